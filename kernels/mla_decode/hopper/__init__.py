"""mla_decode for Hopper: which cases its Gluon kernels take."""

import torch

from kernels.backend import is_hopper
from kernels.mla_decode.call import MlaDecodeCall

__all__ = ["LATENT", "WIDTH", "reason_against"]

LATENT, WIDTH = 512, 576
PAGE_TOKENS = (8, 16, 32, 64, 128, 256)
MAX_ROWS = 2**31


def reason_against(call: MlaDecodeCall) -> str | None:
    """Returns why the Gluon kernels cannot take a checked case, None if they can."""
    q, pages = call.q, call.pages
    if not is_hopper(q.device):
        return f"needs a Hopper GPU, the tensors are on {q.device}"
    if q.dtype is not torch.bfloat16:
        return f"needs queries of bfloat16, got {q.dtype}"
    if (call.latent, pages.shape[2]) != (LATENT, WIDTH):
        return f"needs rows of {LATENT} + {WIDTH - LATENT}, got {call.latent} + {pages.shape[2] - call.latent}"
    if pages.shape[1] not in PAGE_TOKENS:
        return f"needs page_tokens of {PAGE_TOKENS}, got {pages.shape[1]}"
    if pages.stride(0) % WIDTH or pages.data_ptr() % 16 or q.data_ptr() % 16:
        return f"needs pages whole rows of {WIDTH} apart, and 16-byte alignment, stride is {pages.stride(0)}"
    if pages.shape[0] * (pages.stride(0) // WIDTH) >= MAX_ROWS:
        return f"needs fewer than {MAX_ROWS} rows of latents"
    return None
