"""gather_pages and scatter_pages in Triton: one program for a few dense tokens and a run of their columns.

Each token finds its own by a search in cu_seqlens_k, so no list of tokens
is built on the host, and lengths may differ in any way.
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import page_constants, row_strides, search_levels
from kernels.addressing.triton import page_offset, sequence_of
from kernels.fp8 import ScaleKind, Scales
from kernels.fp8.triton import dequantise_rows, quantise_rows
from kernels.gather_pages.call import MoveCall

ELEMENTS = 1024


@triton.jit
def locate(token, tables_ptr, cu_k_ptr, num_seqs, stride_tables_seq, PAGE: tl.constexpr, LEVELS: tl.constexpr):
    """Whether each dense token exists, its page id (64 bits) and its slot there."""
    live = token < tl.load(cu_k_ptr + num_seqs)
    seq, begin = sequence_of(token, cu_k_ptr, num_seqs, LEVELS)
    position = token - begin
    page = tl.load(tables_ptr + seq.to(tl.int64) * stride_tables_seq + position // PAGE, mask=live, other=0)
    return live, page.to(tl.int64), position % PAGE


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
    LEVELS: tl.constexpr,
    GATHER: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, page, offset = locate(token, tables_ptr, cu_k_ptr, num_seqs, stride_tables_seq, PAGE, LEVELS)
    page = page[:, None]
    offset = offset[:, None]
    head = (column // D)[None, :]
    d = (column % D)[None, :]
    ok = live[:, None] & (column < HEADS * D)[None, :]
    row = token.to(tl.int64)[:, None]
    k_dense = k_ptr + row * stride_k_token + head * stride_k_head + d
    v_dense = v_ptr + row * stride_v_token + head * stride_v_head + d
    k_paged = k_pages_ptr + page * stride_k_page + page_offset(offset, head, d, True, HEADS, D, PAGE, X, LAYOUT)
    v_paged = v_pages_ptr + page * stride_v_page + page_offset(offset, head, d, False, HEADS, D, PAGE, X, LAYOUT)
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


# A head at a time, its columns padded to a power of two: a scale is a row's, and 192 has no tile of its own.
@triton.jit(do_not_specialize=["num_seqs", "stride_tables_seq"])
def convert_tokens(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    cu_k_ptr,
    num_seqs,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_page,
    stride_v_page,
    stride_k_scales_page,
    stride_v_scales_page,
    stride_tables_seq,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEVELS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GATHER: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    live, page, offset = locate(token, tables_ptr, cu_k_ptr, num_seqs, stride_tables_seq, PAGE, LEVELS)
    ok = live[:, None] & (column < D)[None, :]
    d = column[None, :]
    slot = offset[:, None]
    row = token.to(tl.int64)[:, None]
    k_dense = k_ptr + row * stride_k_token + head * stride_k_head + d
    v_dense = v_ptr + row * stride_v_token + head * stride_v_head + d
    k_at = (page * stride_k_page)[:, None] + page_offset(slot, head, d, True, HEADS, D, PAGE, X, LAYOUT)
    v_at = (page * stride_v_page)[:, None] + page_offset(slot, head, d, False, HEADS, D, PAGE, X, LAYOUT)
    k_scale_at = page * stride_k_scales_page + head * PAGE + offset
    v_scale_at = page * stride_v_scales_page + head * PAGE + offset
    if GATHER:
        # No `other`: a literal of type fp32 does not convert to fp8, and padding is not stored anyway.
        k = tl.load(k_pages_ptr + k_at, mask=ok)
        v = tl.load(v_pages_ptr + v_at, mask=ok)
        k = dequantise_rows(k, live, k_scales_ptr, k_scale_at, PER_TOKEN)
        v = dequantise_rows(v, live, v_scales_ptr, v_scale_at, PER_TOKEN)
        tl.store(k_dense, k.to(k_ptr.dtype.element_ty), mask=ok)
        tl.store(v_dense, v.to(v_ptr.dtype.element_ty), mask=ok)
    else:
        k = tl.load(k_dense, mask=ok, other=0.0)
        v = tl.load(v_dense, mask=ok, other=0.0)
        tl.store(k_pages_ptr + k_at, quantise_rows(k, live, k_scales_ptr, k_scale_at, PER_TOKEN), mask=ok)
        tl.store(v_pages_ptr + v_at, quantise_rows(v, live, v_scales_ptr, v_scale_at, PER_TOKEN), mask=ok)


def launch(call: MoveCall, gather: bool) -> None:
    """Fills the dense keys and values, or the pages; checked, non-empty arguments."""
    if call.scales is None:
        _launch_columns(call, gather)
    else:
        _launch_heads(call, call.scales, gather)


def _launch_columns(call: MoveCall, gather: bool) -> None:
    """Bytes move in runs of columns."""
    k, v, k_pages, v_pages, block_tables, cu_seqlens_k, _, shape, layout = call
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
            *row_strides(k, v, k_pages, v_pages),
            block_tables.stride(0),
            **page_constants(shape, layout, k_pages.dtype),
            TOKENS=per_program,
            COLUMNS=columns,
            LEVELS=search_levels(num_seqs),
            GATHER=gather,
            num_warps=1,
        )


def _launch_heads(call: MoveCall, scales: Scales, gather: bool) -> None:
    """Quantized pages are converted a head at a time."""
    k, v, k_pages, v_pages, block_tables, cu_seqlens_k, _, shape, layout = call
    num_seqs, block_d = block_tables.shape[0], triton.next_power_of_2(shape.dim)
    per_program = max(1, ELEMENTS // block_d)
    with torch.cuda.device_of(k):
        convert_tokens[(triton.cdiv(k.shape[0], per_program), shape.heads)](
            k,
            v,
            k_pages,
            v_pages,
            scales.k,
            scales.v,
            block_tables,
            cu_seqlens_k,
            num_seqs,
            *row_strides(k, v, k_pages, v_pages),
            scales.k.stride(0),
            scales.v.stride(0),
            block_tables.stride(0),
            **page_constants(shape, layout, k_pages.dtype),
            TOKENS=per_program,
            BLOCK_D=block_d,
            LEVELS=search_levels(num_seqs),
            PER_TOKEN=scales.kind is ScaleKind.PER_TOKEN,
            GATHER=gather,
            num_warps=4,
        )
