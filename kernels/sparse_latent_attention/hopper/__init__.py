"""The fast path of sparse_latent_attention on Hopper: which cases its Gluon kernels take.

That depends on what is fixed for a model and its pool, so it never changes from batch to batch. Which kernels a launch
takes does change with its rows; their bits are the same.
"""

import torch

from kernels.backend import is_hopper
from kernels.sparse_latent_attention.call import SparseLatentCall

__all__ = ["is_few", "reason_against", "reason_against_case"]

LATENT, WIDTH = 512, 576
MAX_ROWS = 2**31
# Chosen latents of a piece: sums are made for each and folded in ascending order, so bits follow from it and a launch
# cannot choose. On an H200, microseconds with pieces of 512, 1,024 and 2,048, 128 heads: one decoding sequence, with a
# program for each piece, 27, 41, 70; 64 of them 106, 91, 82; 2,048 new tokens behind 14,336 2,553, 2,299, 2,101.
PIECE = 1024
# Tiles of 64 heads, of all rows of a launch, up to which `few_launch` is faster. Microseconds there, when it was three
# launches that took 1 to 4 more, and with a program for each piece, H200, rows of 16 heads: 1 tile 14.5 and 40.3, 8
# tiles 25.9 and 41.4, 12 tiles 36.8 and 41.5; of 64: 8 tiles 27.8 and 41.8, 12 tiles 43.3 and 42.8; of 128: 2 tiles
# 15.4 and 41.3, 8 tiles 26.1 and 42.0, 12 tiles 40.2 and 42.9, 14 tiles 44.1 and 43.0.
MOST_TILES = 12


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


def is_few(tokens: int, heads: int) -> bool:
    """Returns whether a launch takes the kernels for few rows."""
    return tokens * -(-heads // 64) <= MOST_TILES
