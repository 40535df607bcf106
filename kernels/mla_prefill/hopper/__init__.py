"""mla_prefill for Hopper: which cases its Gluon kernel takes."""

import torch

from kernels.backend import is_hopper
from kernels.mla_prefill.call import MlaPrefillCall

__all__ = ["DIMS", "reason_against"]

# Of a key's own part, its rotary part and a value.
DIMS = (128, 64, 128)


def reason_against(call: MlaPrefillCall) -> str | None:
    """Returns why the Gluon kernel cannot take a checked case, None if it can."""
    if not is_hopper(call.q.device):
        return f"needs a Hopper GPU, the tensors are on {call.q.device}"
    if call.q.dtype is not torch.bfloat16:
        return f"needs queries of bfloat16, got {call.q.dtype}"
    if call.dims != DIMS:
        return f"needs heads (nope, rope, value) of {DIMS}, got {call.dims}"
    for name, rows in (("q", call.q), ("k_nope", call.k_nope), ("k_rope", call.k_rope), ("v", call.v)):
        if rows.numel() == 0 or rows.data_ptr() % 16 or any(stride % 8 for stride in rows.stride()[:-1]):
            return f"{name}: needs rows aligned to 16 bytes, has shape {list(rows.shape)} and strides {rows.stride()}"
    return None
