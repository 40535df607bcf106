"""append_kv in Triton: pure traffic, one program for a few tokens and a run of their columns.

Knows nothing of sequences; addresses are 64-bit because a pool may pass 2^31 elements.
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import layout_code
from kernels.addressing.kernel import key_offset, value_offset
from kernels.layout import KvLayout, PageShape, pack_width

# Elements of K (and of V) that one program moves: 2 to 4 KiB keep the memory system busiest.
ELEMENTS = 1024


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def append_rows(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    num_tokens,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_page,
    stride_v_page,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = (column // D)[None, :]
    d = (column % D)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    ok = (slot >= 0)[:, None] & (column < HEADS * D)[None, :]
    page = (slot // PAGE)[:, None]
    offset = (slot % PAGE).to(tl.int32)[:, None]
    k = tl.load(k_ptr + token[:, None] * stride_k_token + head * stride_k_head + d, mask=ok)
    v = tl.load(v_ptr + token[:, None] * stride_v_token + head * stride_v_head + d, mask=ok)
    k_at = page * stride_k_page + key_offset(offset, head, d, HEADS, D, PAGE, X, LAYOUT)
    v_at = page * stride_v_page + value_offset(offset, head, d, HEADS, D, PAGE, X, LAYOUT)
    tl.store(k_pages_ptr + k_at, k, mask=ok)
    tl.store(v_pages_ptr + v_at, v, mask=ok)


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    shape: PageShape,
    layout: KvLayout,
) -> None:
    """Launches over checked, non-empty arguments."""
    tokens, width = k.shape[0], shape.heads * shape.dim
    columns = min(ELEMENTS, triton.next_power_of_2(width))
    per_program = ELEMENTS // columns
    grid = (triton.cdiv(tokens, per_program), triton.cdiv(width, columns))
    with torch.cuda.device_of(k):
        append_rows[grid](
            k,
            v,
            k_pages,
            v_pages,
            slot_mapping,
            tokens,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_pages.stride(0),
            v_pages.stride(0),
            HEADS=shape.heads,
            D=shape.dim,
            PAGE=shape.page_tokens,
            X=pack_width(k_pages.dtype),
            LAYOUT=layout_code(layout),
            TOKENS=per_program,
            COLUMNS=columns,
            num_warps=4,
        )
