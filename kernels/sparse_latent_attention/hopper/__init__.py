"""The fast path of sparse_latent_attention on Hopper: which cases its Gluon kernel takes.

The choice depends on what is fixed for a model and its pool, so it never changes from batch to batch.
"""

import torch

from kernels.backend import is_hopper
from kernels.sparse_latent_attention.call import SparseLatentCall

__all__ = ["reason_against", "reason_against_case"]

LATENT, WIDTH = 512, 576
MAX_ROWS = 2**31


def reason_against(call: SparseLatentCall) -> str | None:
    """Returns why the Gluon kernel cannot take a checked case, or None when it can."""
    if not is_hopper(call.q.device):
        return f"needs a Hopper GPU, the tensors are on {call.q.device}"
    return reason_against_case(call)


def reason_against_case(call: SparseLatentCall) -> str | None:
    """The same, whatever the device."""
    q, pages = call.q, call.pages
    if q.dtype is not torch.bfloat16:
        return f"{q.dtype} queries"
    if (call.latent, pages.shape[2]) != (LATENT, WIDTH):
        return f"rows of {call.latent} + {pages.shape[2] - call.latent}, not {LATENT} + {WIDTH - LATENT}"
    if pages.stride(0) % WIDTH or pages.data_ptr() % 16 or q.data_ptr() % 16:
        return f"pages not whole rows of {WIDTH} apart (stride {pages.stride(0)}), or not aligned to 16 bytes"
    if pages.shape[0] * (pages.stride(0) // WIDTH) >= MAX_ROWS:
        return f"{pages.shape[0]} pages of stride {pages.stride(0)} have {MAX_ROWS} rows or more"
    return None
