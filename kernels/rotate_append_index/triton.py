"""rotate_append_index in Triton: pure traffic, a token's rotary queries in blocks of heads and its key.

Addresses are 64-bit because a pool may pass 2^31 elements.

    head of q, key    0       HALF       2 HALF        DIM
                      | first | second   | stays       |
"""

import torch
import triton
import triton.language as tl

from kernels.fp8.triton import quantized, saturated, scale_of
from kernels.rotate_append_index.call import IndexQueries, RotateAppendIndexCall
from kernels.rotation.triton import load_part, store_part, turned

# Heads of a program: 16 times 64 elements that turn are the 2 KiB that keep one warp's loads in flight.
BLOCK_H = 16
# The same where queries become fp8, all of their elements: 2,048 tokens take 21.9 us, and 25.9 with 16 heads.
FP8_BLOCK_H = 8


@triton.jit
def shifted_part(x, mean, scale, norm_ptr, bias_ptr, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A part of rows [n] less their means, times their scales and that part of the weight, plus the bias."""
    d = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(norm_ptr + START + d, mask=d < SIZE, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + START + d, mask=d < SIZE, other=0.0).to(tl.float32)
    return ((x.to(tl.float32) - mean) * scale * weight + bias).to(x.dtype)


@triton.jit
def scale_of_parts(first, second, rest):
    """The scales of rows [n] in three parts; what lies behind a part's end is 0."""
    amax = tl.maximum(tl.max(tl.abs(first.to(tl.float32)), 1), tl.max(tl.abs(second.to(tl.float32)), 1))
    return scale_of(tl.maximum(amax, tl.max(tl.abs(rest.to(tl.float32)), 1)))


@triton.jit
def append_key(
    k_row,
    page_row,
    scale_ptr,
    angle_ptr,
    norm_ptr,
    bias_ptr,
    eps,
    kept,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Keys [1, DIM], normed and turned, into rows of pages."""
    REST: tl.constexpr = DIM - 2 * HALF
    row_ok = tl.full([1], 1, tl.int1)
    whole = load_part(k_row, row_ok, 0, DIM, BLOCK_DIM).to(tl.float32)
    mean = tl.sum(whole, 1)[:, None] / DIM
    away = tl.where((tl.arange(0, BLOCK_DIM) < DIM)[None, :], whole - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(away * away, 1)[:, None] / DIM + eps)
    first = load_part(k_row, row_ok, 0, HALF, BLOCK_HALF)
    second = load_part(k_row, row_ok, HALF, HALF, BLOCK_HALF)
    first = shifted_part(first, mean, scale, norm_ptr, bias_ptr, 0, HALF, BLOCK_HALF)
    second = shifted_part(second, mean, scale, norm_ptr, bias_ptr, HALF, HALF, BLOCK_HALF)
    first, second = turned(first, second, angle_ptr, row_ok, HALF, BLOCK_HALF)
    rest = load_part(k_row, row_ok, 2 * HALF, REST, BLOCK_REST)
    rest = shifted_part(rest, mean, scale, norm_ptr, bias_ptr, 2 * HALF, REST, BLOCK_REST)
    if HAS_SCALES:
        # Weights and biases are 0 behind a part's end.
        factor = scale_of_parts(first, second, rest)
        tl.store(scale_ptr, factor, mask=kept)
        first = quantized(first.to(tl.float32), factor[:, None])
        second = quantized(second.to(tl.float32), factor[:, None])
        rest = quantized(rest.to(tl.float32), factor[:, None])
    store_part(page_row, kept, first, 0, HALF, BLOCK_HALF)
    store_part(page_row, kept, second, HALF, HALF, BLOCK_HALF)
    store_part(page_row, kept, rest, 2 * HALF, REST, BLOCK_REST)


@triton.jit
def rotate_index(
    q_ptr,
    weights_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    norm_ptr,
    bias_ptr,
    pages_ptr,
    scales_ptr,
    slots_ptr,
    q_out_ptr,
    weights_out_ptr,
    eps,
    stride_q_token,
    stride_weights_token,
    stride_k_token,
    stride_page,
    stride_scales_page,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(0) % (Q_BLOCKS + 1)
    token = (tl.program_id(0) // (Q_BLOCKS + 1)).to(tl.int64)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    if block < Q_BLOCKS:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        row_ok = head < HEADS
        row_ptr = q_ptr + token * stride_q_token + head * DIM
        first = load_part(row_ptr, row_ok, 0, HALF, BLOCK_HALF)
        second = load_part(row_ptr, row_ok, HALF, HALF, BLOCK_HALF)
        first, second = turned(first, second, angle_ptr + 0 * head, row_ok, HALF, BLOCK_HALF)
        if HAS_SCALES:
            rest = load_part(row_ptr, row_ok, 2 * HALF, DIM - 2 * HALF, BLOCK_REST)
            scale = scale_of_parts(first, second, rest)
            # Products with a reciprocal: with quotients 2,048 tokens take 26.4 us, not 21.9.
            reciprocal = tl.div_rn(1.0, scale)[:, None]
            first = saturated(first.to(tl.float32) * reciprocal)
            second = saturated(second.to(tl.float32) * reciprocal)
            rest = saturated(rest.to(tl.float32) * reciprocal)
            weight = tl.load(weights_ptr + token * stride_weights_token + head, mask=row_ok)
            tl.store(weights_out_ptr + token * HEADS + head, weight * scale, mask=row_ok)
            row_ptr = q_out_ptr + (token * HEADS + head) * DIM
            store_part(row_ptr, row_ok, rest, 2 * HALF, DIM - 2 * HALF, BLOCK_REST)
        store_part(row_ptr, row_ok, first, 0, HALF, BLOCK_HALF)
        store_part(row_ptr, row_ok, second, HALF, HALF, BLOCK_HALF)
    else:
        one = tl.arange(0, 1)
        slot = tl.load(slots_ptr + token)
        page_row = pages_ptr + slot // PAGE * stride_page + slot % PAGE * DIM
        scale_at = scales_ptr + slot // PAGE * stride_scales_page + slot % PAGE
        append_key(
            k_ptr + token * stride_k_token + one, page_row + one, scale_at + one, angle_ptr + one, norm_ptr, bias_ptr,
            eps, (one == 0) & (slot >= 0), DIM, HALF, BLOCK_DIM, BLOCK_HALF, BLOCK_REST, HAS_SCALES,
        )  # fmt: skip


def launch(call: RotateAppendIndexCall, queries: IndexQueries) -> None:
    """Fills the queries, the call's own where keys are not fp8, and the slots; checked, non-empty arguments."""
    (tokens, heads, dim), pages, scales = call.q.shape, call.pages, call.scales
    half = call.rope // 2
    block_heads = BLOCK_H if scales is None else FP8_BLOCK_H
    blocks = triton.cdiv(heads, block_heads) + 1
    with torch.cuda.device_of(pages):
        rotate_index[(tokens * blocks,)](
            call.q,
            call.weights,
            call.k,
            call.positions,
            call.cos_sin,
            call.norm,
            call.bias,
            pages,
            call.cos_sin if scales is None else scales,
            call.slot_mapping,
            *queries,
            call.eps,
            call.q.stride(0),
            call.weights.stride(0),
            call.k.stride(0),
            pages.stride(0),
            0 if scales is None else scales.stride(0),
            HEADS=heads,
            DIM=dim,
            HALF=half,
            PAGE=pages.shape[1],
            BLOCK_H=block_heads,
            BLOCK_DIM=triton.next_power_of_2(dim),
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * half)),
            HAS_SCALES=scales is not None,
            # A product that is fused with a sum is rounded once less than torch's two operations.
            enable_fp_fusion=False,
            # One: q is read and written in place, so no other warp may hold a copy of what this one has turned.
            num_warps=1,
        )
