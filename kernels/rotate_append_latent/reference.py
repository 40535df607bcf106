"""rotate_append_latent in plain torch: norm, rotation and append one after the other."""

import torch

from kernels.backend import Backend
from kernels.key_rows import append_rows
from kernels.rms_norm import rms_norm
from kernels.rotate_append_latent.call import RotateAppendLatentCall
from kernels.rotation.reference import rotated


def rotate_append_latent(call: RotateAppendLatentCall) -> None:
    """Turns q in place and fills the slots."""
    keys = call.kv[:, call.latent :] if call.cos_sin is None else _turn(call, call.cos_sin)
    latents = rms_norm(call.kv[:, : call.latent], call.norm, call.eps, backend=Backend.REFERENCE)
    append_rows(torch.cat((latents, keys), dim=-1), call.pages, call.slot_mapping)


def _turn(call: RotateAppendLatentCall, cos_sin: torch.Tensor) -> torch.Tensor:
    """Turns q in place and returns the keys, turned."""
    cos, sin = cos_sin.index_select(0, call.positions).unsqueeze(2).unbind(1)
    turning = call.q[..., -call.rope :]
    # Queries and keys in one: on a CPU a short batch costs as much as it has calls of torch.
    both = rotated(torch.cat((turning, call.kv[:, None, call.latent :]), dim=1), cos, sin)
    turning.copy_(both[:, :-1])
    return both[:, -1]
