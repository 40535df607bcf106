"""rotate_append_kv in Triton: pure traffic, one program for a block of heads of a few tokens.

A head is held as the elements that turn with each other and those that do not turn, so that a rotation is arithmetic of
two tiles; addresses are 64-bit because a pool may pass 2^31 elements.

    head       0            HALF         2 * HALF      D
               | first      | second     | rest        |
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import layout_index
from kernels.addressing.triton import page_offset
from kernels.fp8 import ScaleKind, Scales
from kernels.fp8.triton import quantized, stored_scale
from kernels.launches import allow_next_launch_and_wait, overlap_options
from kernels.layout import pack_width
from kernels.rotate_append_kv.call import RotateAppendCall
from kernels.rotation.triton import load_part, normalise_part, squares, store_part, turned

# Elements that one warp moves: 2 KiB, next to what its neighbours move, keep the memory system busiest.
ELEMENTS = 1024
BLOCK_H = 8


@triton.jit
def store_in_page(
    page_ptr,
    slot,
    head,
    row_ok,
    x,
    KEYS: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Elements [START, START + SIZE) of one head of slot [n] in the page at page_ptr [n]."""
    d = tl.arange(0, BLOCK)[None, :]
    ok = row_ok[:, None] & (d < SIZE)
    at = page_offset(slot[:, None], head[:, None], START + d, KEYS, HEADS, D, PAGE, X, LAYOUT)
    tl.store(page_ptr[:, None] + at, x, mask=ok)


@triton.jit
def normalise_and_turn(
    first,
    second,
    rest,
    angle_ptr,
    row_ok,
    norm_ptr,
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """A head's parts as attention wants them; angle_ptr [n] are rows of the table of cosines and sines."""
    if NORM:
        total = squares(first) + squares(second)
        if D > 2 * HALF:
            total += squares(rest)
        scale = tl.rsqrt(total / D + eps)
        first = normalise_part(first, scale, norm_ptr, 0, HALF, BLOCK_HALF)
        second = normalise_part(second, scale, norm_ptr, HALF, HALF, BLOCK_HALF)
        if D > 2 * HALF:
            rest = normalise_part(rest, scale, norm_ptr, 2 * HALF, D - 2 * HALF, BLOCK_REST)
    first, second = turned(first, second, angle_ptr, row_ok, HALF, BLOCK_HALF)
    return first, second, rest


@triton.jit
def append_parts(
    first,
    second,
    rest,
    pages_ptr,
    scales_ptr,
    stride_page,
    stride_scales_page,
    slot,
    head,
    row_ok,
    KEYS: tl.constexpr,
    SCALES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """A head of each of rows [n] into its slot, quantized where SCALES says so (0: no, 1: per tensor, 2: per token)."""
    REST: tl.constexpr = D - 2 * HALF
    row_ok = row_ok & (slot >= 0)
    page = slot // PAGE
    offset = (slot % PAGE).to(tl.int32)
    if SCALES:
        first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        if SCALES == 2:
            amax = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
            if REST:
                amax = tl.maximum(amax, tl.max(tl.abs(rest), 1))
            scale = stored_scale(amax, row_ok, scales_ptr, page * stride_scales_page + head * PAGE + offset)[:, None]
        else:
            scale = tl.load(scales_ptr)
        first, second = quantized(first, scale), quantized(second, scale)
        if REST:
            rest = quantized(rest, scale)
    at = pages_ptr + page * stride_page
    store_in_page(at, offset, head, row_ok, first, KEYS, 0, HALF, BLOCK_HALF, HEADS, D, PAGE, X, LAYOUT)
    store_in_page(at, offset, head, row_ok, second, KEYS, HALF, HALF, BLOCK_HALF, HEADS, D, PAGE, X, LAYOUT)
    if REST:
        store_in_page(at, offset, head, row_ok, rest, KEYS, 2 * HALF, REST, BLOCK_REST, HEADS, D, PAGE, X, LAYOUT)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens", "num_unpacked"])
def rotate_rows(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slots_ptr,
    out_ptr,
    packed_ptr,
    num_tokens,
    num_unpacked,
    eps,
    stride_qkv_token,
    stride_qkv_head,
    stride_k_page,
    stride_v_page,
    stride_k_scales_page,
    stride_v_scales_page,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * KV_BLOCKS
    REST: tl.constexpr = D - 2 * HALF
    # A token's blocks are neighbours in launch order: its row is read, and its slots are written, in one run.
    block = tl.program_id(0) % BLOCKS
    row = tl.arange(0, TOKENS * BLOCK_H)
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) * TOKENS + row // BLOCK_H
    # 0: queries, 1: keys, 2: values; heads count from 0 within their kind.
    kind = tl.where(block < Q_BLOCKS, 0, 1 + (block - Q_BLOCKS) // KV_BLOCKS)
    first_block = tl.where(kind == 0, 0, Q_BLOCKS + (kind - 1) * KV_BLOCKS)
    heads = tl.where(kind == 0, Q_HEADS, HEADS)
    first_head = tl.where(kind == 0, 0, Q_HEADS + (kind - 1) * HEADS)
    head = (block - first_block) * BLOCK_H + row % BLOCK_H
    row_ok = (token < num_tokens) & (head < heads)
    row_ptr = qkv_ptr + token * stride_qkv_token + (first_head + head) * stride_qkv_head
    first = load_part(row_ptr, row_ok, 0, HALF, BLOCK_HALF)
    second = load_part(row_ptr, row_ok, HALF, HALF, BLOCK_HALF)
    rest = first
    if REST:
        rest = load_part(row_ptr, row_ok, 2 * HALF, REST, BLOCK_REST)
    slot = tl.load(slots_ptr + token, mask=row_ok, other=-1)
    if kind == 2:
        append_parts(
            first, second, rest, v_pages_ptr, v_scales_ptr, stride_v_page, stride_v_scales_page, slot, head, row_ok,
            False, SCALES, HALF, BLOCK_HALF, BLOCK_REST, HEADS, D, PAGE, X, LAYOUT,
        )  # fmt: skip
    else:
        position = tl.load(positions_ptr + token, mask=row_ok, other=0).to(tl.int64)
        norm_ptr = q_norm_ptr if kind == 0 else k_norm_ptr
        first, second, rest = normalise_and_turn(
            first, second, rest, cos_sin_ptr + position * (2 * HALF), row_ok, norm_ptr, eps,
            NORM, D, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
        if kind == 1:
            append_parts(
                first, second, rest, k_pages_ptr, k_scales_ptr, stride_k_page, stride_k_scales_page, slot, head, row_ok,
                True, SCALES, HALF, BLOCK_HALF, BLOCK_REST, HEADS, D, PAGE, X, LAYOUT,
            )  # fmt: skip
        else:
            GQA_GROUP: tl.constexpr = Q_HEADS // HEADS
            unpacked = row_ok & (token < num_unpacked)
            packed = row_ok & (token >= num_unpacked)
            packed_row = (head // GQA_GROUP) * (num_tokens - num_unpacked).to(tl.int64) + token - num_unpacked
            out_row = out_ptr + (token * Q_HEADS + head) * D
            packed_at = packed_ptr + (packed_row * GQA_GROUP + head % GQA_GROUP) * D
            store_part(out_row, unpacked, first, 0, HALF, BLOCK_HALF)
            store_part(out_row, unpacked, second, HALF, HALF, BLOCK_HALF)
            store_part(packed_at, packed, first, 0, HALF, BLOCK_HALF)
            store_part(packed_at, packed, second, HALF, HALF, BLOCK_HALF)
            if REST:
                store_part(out_row, unpacked, rest, 2 * HALF, REST, BLOCK_REST)
                store_part(packed_at, packed, rest, 2 * HALF, REST, BLOCK_REST)


def launch(call: RotateAppendCall) -> None:
    """Fills the slots, out and packed_out; checked, non-empty arguments."""
    qkv, rotary, norms, scales, shape = call.qkv, call.rotary, call.norms, call.scales, call.shape
    k_pages, v_pages = call.k_pages, call.v_pages
    tokens, q_heads = qkv.shape[0], qkv.shape[1] - 2 * shape.heads
    block_h = min(BLOCK_H, triton.next_power_of_2(q_heads))
    elements = block_h * triton.next_power_of_2(shape.dim)
    per_program = max(1, ELEMENTS // elements)
    blocks = triton.cdiv(q_heads, block_h) + 2 * triton.cdiv(shape.heads, block_h)
    half = rotary.dim // 2
    with torch.cuda.device_of(qkv):
        rotate_rows[(triton.cdiv(tokens, per_program) * blocks,)](
            qkv,
            call.positions,
            rotary.cos_sin,
            qkv if norms is None else norms.q,
            qkv if norms is None else norms.k,
            k_pages,
            v_pages,
            rotary.cos_sin if scales is None else scales.k,
            rotary.cos_sin if scales is None else scales.v,
            call.slot_mapping,
            call.out,
            call.packed_out,
            tokens,
            call.num_unpacked,
            0.0 if norms is None else norms.eps,
            *qkv.stride()[:2],
            k_pages.stride(0),
            v_pages.stride(0),
            *((0, 0) if scales is None else (scales.k.stride(0), scales.v.stride(0))),
            Q_HEADS=q_heads,
            HEADS=shape.heads,
            D=shape.dim,
            HALF=half,
            PAGE=shape.page_tokens,
            X=pack_width(k_pages.dtype),
            LAYOUT=layout_index(call.layout),
            NORM=norms is not None,
            SCALES=_scale_index(scales),
            TOKENS=per_program,
            BLOCK_H=block_h,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_REST=triton.next_power_of_2(max(1, shape.dim - 2 * half)),
            # A product that is fused with a sum is rounded once less than torch's two operations.
            enable_fp_fusion=False,
            num_warps=max(1, elements // ELEMENTS),
            **overlap_options(qkv.device),
        )


def _scale_index(scales: Scales | None) -> int:
    if scales is None:
        return 0
    return 1 if scales.kind is ScaleKind.PER_TENSOR else 2
