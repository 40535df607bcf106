"""decode_attention in Triton: one program for one split of a sequence and one kv head, then one that merges the splits.

Splits are SPLIT keys long and start at absolute multiples of SPLIT, their fp32 partials are merged in ascending order:
the sum depends neither on which program computes which part nor on other requests.

    keys       0 ........ SPLIT ........ 2 SPLIT .... length
    partials   |    0       |      1        |    2     |      acc, row_max, row_sum of each; windows skip the first

A split that some token of a sequence does not see gives it a state without keys, which leaves the others as they are:
so a token's bits do not depend on how many tokens are computed with it.
"""

import torch
import triton
import triton.language as tl

from kernels import softmax
from kernels.addressing import layout_index
from kernels.addressing.triton import load_keys_values, query_span
from kernels.decode_attention.call import DecodeCall
from kernels.decode_attention.merge_triton import merge
from kernels.fp8 import ScaleKind
from kernels.layout import pack_width
from kernels.softmax.triton import MASKED, NO_KEYS

SPLIT = 256
# The smallest tile that tensor cores take. More rows take more programs: a larger tile would be multiplied by other
# instructions, whose sums have other bits.
ROWS = 16


def key_block(dim: int) -> int:
    """Keys of one tile: as many as four warps hold in their registers."""
    return 64 if dim <= 128 else 32


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["max_splits", "stride_tables_seq"])
def attend_split(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    tables_ptr,
    seqlens_ptr,
    cu_q_ptr,
    scale_log2,
    cap_log2,
    max_splits,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_v_page,
    stride_k_scales,
    stride_v_scales,
    stride_tables_seq,
    HEADS: tl.constexpr,
    GQA_GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (TOKENS * GQA_GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // BLOCKS
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    start, tokens, length = query_span(cu_q_ptr, seqlens_ptr, seq, HAS_SPANS)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - tokens - WINDOW + 1, 0)
    last = tl.minimum(length, (split + 1) * SPLIT)
    first_row = tl.program_id(0) % BLOCKS * ROWS
    if (split * SPLIT >= length) | (last <= lowest) | (first_row >= tokens * GQA_GROUP):
        return

    row = first_row + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    head = kv_head * GQA_GROUP + row % GQA_GROUP
    live = (row // GQA_GROUP < tokens) & (row < TOKENS * GQA_GROUP)
    position = length - tokens + row // GQA_GROUP
    q_at = (start + row // GQA_GROUP)[:, None] * stride_q_token + head[:, None] * stride_q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    table_ptr = tables_ptr + seq * stride_tables_seq
    row_max = tl.full([ROWS], NO_KEYS, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    first = tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
    for tile in tl.range(first, last, BLOCK_N, num_stages=3):
        key = tile + column
        ok = (key >= lowest) & (key < last)
        page = tl.load(table_ptr + key // PAGE, mask=ok, other=0).to(tl.int64)
        slot = key % PAGE
        k, v = load_keys_values(
            k_pages_ptr,
            v_pages_ptr,
            page,
            slot,
            kv_head,
            d,
            ok,
            stride_k_page,
            stride_v_page,
            HEADS,
            D,
            PAGE,
            X,
            LAYOUT,
        )
        if SCALES > 0:
            # q's dtype holds every fp8 value; the scales are applied after the products.
            k = k.to(tl.float32).to(q.dtype)
            v = v.to(tl.float32).to(q.dtype)
        scores = tl.dot(q, k) * scale_log2
        if SCALES == 1:
            scores = scores * tl.load(k_scales_ptr)
        if SCALES == 2:
            scale_at = kv_head * PAGE + slot
            k_scale = tl.load(k_scales_ptr + page * stride_k_scales + scale_at, mask=ok, other=0.0)
            v_scale = tl.load(v_scales_ptr + page * stride_v_scales + scale_at, mask=ok, other=0.0)
            scores = scores * k_scale[None, :]
        if SOFTCAP:
            # cap * tanh(x) with tanh(x) = 1 - 2 / (e^2x + 1); the scale holds the 2.
            scores = cap_log2 - 2.0 * cap_log2 / (tl.exp2(scores) + 1.0)
        visible = ok[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        if SCALES == 2:
            weights = weights * v_scale[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        row_max = new_max

    if SCALES == 1:
        acc = acc * tl.load(v_scales_ptr)
    part = ((seq * max_splits + split) * HEADS + kv_head) * (TOKENS * GQA_GROUP) + row
    tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])
    tl.store(row_max_ptr + part, row_max, mask=live)
    tl.store(row_sum_ptr + part, row_sum, mask=live)


def launch(call: DecodeCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked arguments; there is at least one sequence."""
    q, k_pages, v_pages, spec, num_seqs = call.q, call.k_pages, call.v_pages, call.spec, call.num_seqs
    shape, group, max_q_tokens = spec.shape, spec.group, call.max_q_tokens
    splits = max(1, triton.cdiv(call.max_seqlen_k, SPLIT))
    parts = (num_seqs, splits, spec.q_heads * max_q_tokens)
    acc = torch.empty((*parts, shape.dim), dtype=torch.float32, device=q.device)
    row_max, row_sum = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
    k_scales, v_scales, kind = (out, out, None) if spec.scales is None else spec.scales
    by_token = kind is ScaleKind.PER_TOKEN
    sizes = {
        "HEADS": shape.heads,
        "GQA_GROUP": group,
        "TOKENS": max_q_tokens,
        "D": shape.dim,
        "WINDOW": spec.window,
        "SPLIT": SPLIT,
        "BLOCK_D": triton.next_power_of_2(shape.dim),
        "HAS_SPANS": call.cu_seqlens_q is not None,
    }
    row_blocks = triton.cdiv(max_q_tokens * group, ROWS)
    with torch.cuda.device_of(q):
        attend_split[(shape.heads * row_blocks, splits, num_seqs)](
            q,
            k_pages,
            v_pages,
            k_scales,
            v_scales,
            acc,
            row_max,
            row_sum,
            call.block_tables,
            call.seqlens_k,
            call.spans_or_any,
            2.0 * softmax.LOG2_E * spec.scale / spec.softcap if spec.softcap else spec.scale * softmax.LOG2_E,
            spec.softcap * softmax.LOG2_E,
            splits,
            q.stride(0),
            q.stride(1),
            k_pages.stride(0),
            v_pages.stride(0),
            k_scales.stride(0) if by_token else 0,
            v_scales.stride(0) if by_token else 0,
            call.block_tables.stride(0),
            PAGE=shape.page_tokens,
            X=pack_width(k_pages.dtype),
            LAYOUT=layout_index(spec.layout),
            ROWS=ROWS,
            BLOCK_N=key_block(shape.dim),
            SOFTCAP=spec.softcap > 0.0,
            SCALES=0 if kind is None else kind.value,
            num_warps=4,
            **sizes,
        )
        merge(call, (acc, row_max, row_sum), splits, sizes, out, lse)
