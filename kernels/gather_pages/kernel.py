"""gather_pages and scatter_pages in Triton: one program for a few dense tokens and a run of their columns.

Knows no sequence before it looks: each token finds its own by a binary search in cu_seqlens_k, so no list of tokens
is built on the host and a batch may be as ragged as it likes.
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import layout_code
from kernels.addressing.kernel import key_offset, value_offset
from kernels.layout import KvLayout, PageShape, pack_width

ELEMENTS = 1024


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_seqs", "stride_tables_seq"])
def move_tokens(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    tables_ptr,
    cu_k_ptr,
    num_seqs,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_page,
    stride_v_page,
    stride_tables_seq,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    GATHER: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = token < tl.load(cu_k_ptr + num_seqs)
    # The last sequence that starts at or before the token: empty sequences start there too, so they are stepped over.
    low = tl.zeros([TOKENS], tl.int32)
    high = tl.zeros([TOKENS], tl.int32) + num_seqs
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        right = tl.load(cu_k_ptr + middle) <= token
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    position = token - tl.load(cu_k_ptr + low)
    page = tl.load(tables_ptr + low.to(tl.int64) * stride_tables_seq + position // PAGE, mask=live, other=0)
    page = page.to(tl.int64)[:, None]
    offset = (position % PAGE)[:, None]
    head = (column // D)[None, :]
    d = (column % D)[None, :]
    ok = live[:, None] & (column < HEADS * D)[None, :]
    row = token.to(tl.int64)[:, None]
    k_dense = k_ptr + row * stride_k_token + head * stride_k_head + d
    v_dense = v_ptr + row * stride_v_token + head * stride_v_head + d
    k_paged = k_pages_ptr + page * stride_k_page + key_offset(offset, head, d, HEADS, D, PAGE, X, LAYOUT)
    v_paged = v_pages_ptr + page * stride_v_page + value_offset(offset, head, d, HEADS, D, PAGE, X, LAYOUT)
    if GATHER:
        k = tl.load(k_paged, mask=ok)
        v = tl.load(v_paged, mask=ok)
        tl.store(k_dense, k, mask=ok)
        tl.store(v_dense, v, mask=ok)
    else:
        k = tl.load(k_dense, mask=ok)
        v = tl.load(v_dense, mask=ok)
        tl.store(k_paged, k, mask=ok)
        tl.store(v_paged, v, mask=ok)


def launch_gather(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    shape: PageShape,
    layout: KvLayout,
) -> None:
    """Fills the dense keys and values; checked, non-empty arguments."""
    _launch(out[0], out[1], k_pages, v_pages, block_tables, cu_seqlens_k, shape, layout, gather=True)


def launch_scatter(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    shape: PageShape,
    layout: KvLayout,
) -> None:
    """Fills the pages; checked, non-empty arguments."""
    _launch(k, v, k_pages, v_pages, block_tables, cu_seqlens_k, shape, layout, gather=False)


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    shape: PageShape,
    layout: KvLayout,
    gather: bool,
) -> None:
    width, num_seqs = shape.heads * shape.dim, block_tables.shape[0]
    columns = min(ELEMENTS, triton.next_power_of_2(width))
    per_program = ELEMENTS // columns
    grid = (triton.cdiv(k.shape[0], per_program), triton.cdiv(width, columns))
    with torch.cuda.device_of(k):
        move_tokens[grid](
            k,
            v,
            k_pages,
            v_pages,
            block_tables,
            cu_seqlens_k,
            num_seqs,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_pages.stride(0),
            v_pages.stride(0),
            block_tables.stride(0),
            HEADS=shape.heads,
            D=shape.dim,
            PAGE=shape.page_tokens,
            X=pack_width(k_pages.dtype),
            LAYOUT=layout_code(layout),
            TOKENS=per_program,
            COLUMNS=columns,
            SEARCH_STEPS=num_seqs.bit_length(),
            GATHER=gather,
            num_warps=4,
        )
