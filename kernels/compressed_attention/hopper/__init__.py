"""The fast path of compressed_attention on Hopper: which cases its Gluon kernels take.

That depends on what is fixed for a model and its pools, so it never changes from batch to batch. Which of the kernels a
launch takes does change with its rows; their bits are the same.
"""

import torch

from kernels.backend import is_hopper
from kernels.compressed_attention.call import CompressedCall

__all__ = ["reason_against", "reason_against_case"]

DIM = 512
MAX_ROWS = 2**31


def reason_against(call: CompressedCall) -> str | None:
    """Returns why the Gluon kernel cannot take a checked case, or None when it can."""
    if not is_hopper(call.q.device):
        return f"needs a Hopper GPU, the tensors are on {call.q.device}"
    return reason_against_case(call)


def reason_against_case(call: CompressedCall) -> str | None:
    """The same, whatever the device."""
    q, entries = call.q, call.entries
    if q.dtype is not torch.bfloat16:
        return f"{q.dtype} queries"
    if q.shape[2] != DIM:
        return f"heads of {q.shape[2]} elements, not {DIM}"
    if q.data_ptr() % 16:
        return "q not aligned to 16 bytes"
    for name, pages in (("window_pages", call.window_pages), ("entry_pages", entries.pages if entries else None)):
        if pages is None:
            continue
        if pages.stride(0) % DIM or pages.data_ptr() % 16:
            return f"{name} not whole rows of {DIM} apart (stride {pages.stride(0)}), or not aligned to 16 bytes"
        if pages.shape[0] * (pages.stride(0) // DIM) >= MAX_ROWS:
            return f"{name}: {pages.shape[0]} of stride {pages.stride(0)} have {MAX_ROWS} rows or more"
    return None
