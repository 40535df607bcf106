"""append_kv in Triton: pure traffic, one program for a few tokens and a run of their columns.

Addresses are 64-bit because a pool may pass 2^31 elements.
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import page_constants, row_strides
from kernels.addressing.triton import page_offset
from kernels.append_kv.call import AppendCall
from kernels.fp8 import ScaleKind, Scales
from kernels.fp8.triton import quantise_rows

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
    k_at = page * stride_k_page + page_offset(offset, head, d, True, HEADS, D, PAGE, X, LAYOUT)
    v_at = page * stride_v_page + page_offset(offset, head, d, False, HEADS, D, PAGE, X, LAYOUT)
    tl.store(k_pages_ptr + k_at, k, mask=ok)
    tl.store(v_pages_ptr + v_at, v, mask=ok)


# A head at a time, so that a row's largest value is found in one program; columns are padded to a power of two.
@triton.jit(do_not_specialize=["num_tokens"])
def append_quantized(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slots_ptr,
    num_tokens,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_page,
    stride_v_page,
    stride_k_scales_page,
    stride_v_scales_page,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    row_ok = slot >= 0
    ok = row_ok[:, None] & (column < D)[None, :]
    page = slot // PAGE
    offset = (slot % PAGE).to(tl.int32)
    d = column[None, :]
    k = tl.load(k_ptr + token[:, None] * stride_k_token + head * stride_k_head + d, mask=ok, other=0.0)
    v = tl.load(v_ptr + token[:, None] * stride_v_token + head * stride_v_head + d, mask=ok, other=0.0)
    scale_at = head * PAGE + offset
    k = quantise_rows(k, row_ok, k_scales_ptr, page * stride_k_scales_page + scale_at, PER_TOKEN)
    v = quantise_rows(v, row_ok, v_scales_ptr, page * stride_v_scales_page + scale_at, PER_TOKEN)
    slot_in = offset[:, None]
    k_at = (page * stride_k_page)[:, None] + page_offset(slot_in, head, d, True, HEADS, D, PAGE, X, LAYOUT)
    v_at = (page * stride_v_page)[:, None] + page_offset(slot_in, head, d, False, HEADS, D, PAGE, X, LAYOUT)
    tl.store(k_pages_ptr + k_at, k, mask=ok)
    tl.store(v_pages_ptr + v_at, v, mask=ok)


def launch(call: AppendCall) -> None:
    """Launches over checked, non-empty arguments."""
    if call.scales is None:
        _launch_rows(call)
    else:
        _launch_quantized(call, call.scales)


def _launch_quantized(call: AppendCall, scales: Scales) -> None:
    k, v, k_pages, v_pages, shape = call.k, call.v, call.k_pages, call.v_pages, call.shape
    block_d = triton.next_power_of_2(shape.dim)
    per_program = max(1, ELEMENTS // block_d)
    with torch.cuda.device_of(k):
        append_quantized[(triton.cdiv(k.shape[0], per_program), shape.heads)](
            k,
            v,
            k_pages,
            v_pages,
            scales.k,
            scales.v,
            call.slot_mapping,
            k.shape[0],
            *row_strides(k, v, k_pages, v_pages),
            scales.k.stride(0),
            scales.v.stride(0),
            **page_constants(shape, call.layout, k_pages.dtype),
            TOKENS=per_program,
            BLOCK_D=block_d,
            PER_TOKEN=scales.kind is ScaleKind.PER_TOKEN,
            num_warps=4,
        )


def _launch_rows(call: AppendCall) -> None:
    k, v, k_pages, v_pages, shape = call.k, call.v, call.k_pages, call.v_pages, call.shape
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
            call.slot_mapping,
            tokens,
            *row_strides(k, v, k_pages, v_pages),
            **page_constants(shape, call.layout, k_pages.dtype),
            TOKENS=per_program,
            COLUMNS=columns,
            num_warps=1,
        )
