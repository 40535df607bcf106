"""The fast path of index_logits on Hopper: which cases it takes, and how a launch is divided.

What decides whether it takes a case is fixed for a model and its pool. Its three kernels and the plain one give the
same bits, so which of them runs may follow the launch's size.
"""

import torch

from kernels.backend import is_hopper
from kernels.fp8 import E4M3
from kernels.index_logits.call import IndexLogitsCall

__all__ = ["is_better_plain", "is_tiled", "reason_against", "reason_against_case"]

DIM, HEADS = 128, (32, 64)
# By the bytes of an element: a warp's lanes hold the pages of a block of keys, which has 256 of 2 bytes or 384 of 1.
MIN_PAGE_TOKENS = {2: 8, 1: 16}
# Least query rows of a launch for the tiled kernel, which keeps a block of keys in registers for a sequence's rows.
LEAST_TILED_ROWS = 256
# Of these, launches of fewer logits have too few tiles; 700 rows of as many keys take 22 us, with the plain kernel 25.
# Over fp8 keys blocks of 384 are too wide for short prompts: four of 512 tokens take 34 us, with the plain kernel 24.
LEAST_TILED_LOGITS = 448 << 10
LEAST_TILED_FP8_KEYS = 1024


def is_tiled(call: IndexLogitsCall) -> bool:
    """Returns whether a launch holds prompts, judged by the sizes that the host knows."""
    return call.q.shape[0] >= LEAST_TILED_ROWS and call.q.shape[0] > call.block_tables.shape[0]


def is_better_plain(call: IndexLogitsCall) -> bool:
    """Returns whether the plain kernel is faster for a launch."""
    least_keys = 0 if call.scales is None else LEAST_TILED_FP8_KEYS
    is_short = call.q.shape[0] * call.max_keys < LEAST_TILED_LOGITS or call.max_keys < least_keys
    return is_tiled(call) and is_short


def reason_against(call: IndexLogitsCall) -> str | None:
    """Returns why the Gluon kernels cannot take a checked case, or None when they can."""
    if not is_hopper(call.q.device):
        return f"needs a Hopper GPU, the tensors are on {call.q.device}"
    return reason_against_case(call)


def reason_against_case(call: IndexLogitsCall) -> str | None:
    """The same, whatever the device."""
    (_, heads, dim), pages = call.q.shape, call.pages
    page_tokens = pages.shape[1]
    if call.q.dtype not in (torch.bfloat16, torch.float16, E4M3):
        return f"{call.q.dtype} queries"
    if dim != DIM or heads not in HEADS:
        return f"{heads} heads of {dim}, not {' or '.join(map(str, HEADS))} of {DIM}"
    least = MIN_PAGE_TOKENS[pages.element_size()]
    if page_tokens < least or page_tokens & (page_tokens - 1):
        return f"page_tokens {page_tokens} is no power of two from {least} on"
    return _reason_against_strides(call)


def _reason_against_strides(call: IndexLogitsCall) -> str | None:
    """What the copy engine cannot address."""
    q, weights, pages = call.q, call.weights, call.pages
    if q.data_ptr() % 16 or q.stride(0) * q.element_size() % 16:
        return f"queries not aligned to 16 bytes, strides {q.stride()}"
    if weights.data_ptr() % 16 or weights.shape[0] * weights.stride(0) >= 2**31:
        return f"weights not aligned to 16 bytes or of more than 2^31 elements, strides {weights.stride()}"
    if pages.data_ptr() % 16 or pages.stride(0) % DIM:
        return f"pages not aligned to rows of {DIM} elements, strides {pages.stride()}"
    if pages.shape[0] * pages.stride(0) // DIM >= 2**31:
        return f"{pages.shape[0]} pages of stride {pages.stride(0)} have more than 2^31 rows"
    return None
