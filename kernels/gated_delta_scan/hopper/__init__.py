"""The fast path of gated_delta_scan on Hopper: which layers its Gluon kernels take.

`kernel` solves blocks of a decay for each head, `channels` those of one for each key channel. States pass in
kernels/block_scan/hopper.
"""

from kernels.backend import is_hopper
from kernels.block_scan import GatedDeltaLayer
from kernels.block_scan.hopper import reason_against_case as reason_against_rows

__all__ = ["reason_against", "reason_against_case"]


def reason_against(layer: GatedDeltaLayer) -> str | None:
    """Returns why the Gluon kernels cannot take a checked layer, or None when they can."""
    if not is_hopper(layer.v.device):
        return f"needs a Hopper GPU, the tensors are on {layer.v.device}"
    return reason_against_case(layer)


def reason_against_case(layer: GatedDeltaLayer) -> str | None:
    """The same, whatever the device."""
    if layer.norm_eps is None and not layer.by_channel:
        return "keys of any length, whose inverses fp16 may not hold"
    return reason_against_rows(layer.q, layer.k, layer.v)
