"""decode_attention in Triton: one program for one split of a sequence and one kv head, then one that merges the splits.

Knows nothing of the batch. Splits are SPLIT keys long and start at absolute multiples of SPLIT, their fp32 partials are
merged in ascending order: the sum is the same whoever computes which part and whoever else is in the batch.

    keys       0 ........ SPLIT ........ 2 SPLIT .... length
    partials   |    0       |      1        |    2     |      acc, peak, total of each; a window skips the first ones
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import layout_code
from kernels.addressing.kernel import key_offset, value_offset
from kernels.attention import AttentionSpec
from kernels.layout import pack_width

LOG2_E = 1.4426950408889634
SPLIT = 256
BLOCK_N = 64
ROWS = 16  # the smallest tile that tensor cores take: a group's query heads, padded


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["max_splits", "stride_tables_seq"])
def attend_split(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    tables_ptr,
    seqlens_ptr,
    scale_log2,
    max_splits,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_v_page,
    stride_tables_seq,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    length = tl.load(seqlens_ptr + seq)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    last = tl.minimum(length, (split + 1) * SPLIT)
    if (split * SPLIT >= length) | (last <= lowest):
        return

    row = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + row
    q_at = seq * stride_q_token + head[:, None] * stride_q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=(row < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    table_ptr = tables_ptr + seq * stride_tables_seq
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    first = tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=3):
        key = start + column
        ok = key < last
        if WINDOW > 0:
            ok = ok & (key >= lowest)
        page = tl.load(table_ptr + key // PAGE, mask=ok, other=0).to(tl.int64)
        slot = key % PAGE
        k_at = (page * stride_k_page)[None, :] + key_offset(
            slot[None, :], kv_head, d[:, None], HEADS, D, PAGE, X, LAYOUT
        )
        v_at = (page * stride_v_page)[:, None] + value_offset(
            slot[:, None], kv_head, d[None, :], HEADS, D, PAGE, X, LAYOUT
        )
        k = tl.load(k_pages_ptr + k_at, mask=ok[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_pages_ptr + v_at, mask=ok[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.where(ok[None, :], tl.dot(q, k) * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))  # finite: every tile has a visible key
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        peak = new_peak

    part = (seq * max_splits + split) * (HEADS * GROUP) + head
    tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=(row < GROUP)[:, None] & (d < D)[None, :])
    tl.store(peak_ptr + part, peak, mask=row < GROUP)
    tl.store(total_ptr + part, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["num_seqs", "max_splits"])
def merge_splits(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    seqlens_ptr,
    num_seqs,
    max_splits,
    stride_out_token,
    stride_out_head,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WANTS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    LN_2: tl.constexpr = 0.6931471805599453
    LOG2_E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    length = tl.load(seqlens_ptr + seq)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    d = tl.arange(0, BLOCK_D)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in tl.range(lowest // SPLIT, tl.cdiv(length, SPLIT)):
        part = (seq * max_splits + split) * heads + head
        part_peak = tl.load(peak_ptr + part)
        new_peak = tl.maximum(peak, part_peak)
        decay = tl.exp2(peak - new_peak)
        weight = tl.exp2(part_peak - new_peak)
        total = total * decay + tl.load(total_ptr + part) * weight
        acc = acc * decay + tl.load(acc_ptr + part * D + d, mask=d < D, other=0.0) * weight
        peak = new_peak
    if HAS_SINKS:
        # Here and not in the splits, or it would count once for each of them; a row without keys has none.
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        sink = tl.where(length > 0, sink, float("-inf"))
        new_peak = tl.maximum(peak, sink)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - base)
        total = total * decay + tl.exp2(sink - base)
        acc = acc * decay
        peak = new_peak
    out = tl.div_rn(acc, tl.where(total == 0.0, 1.0, total))
    out_at = seq * stride_out_token + head * stride_out_head + d
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=d < D)
    if WANTS_LSE:
        tl.store(lse_ptr + head.to(tl.int64) * num_seqs + seq, (peak + tl.log2(total)) * LN_2)


def launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launches over checked arguments; there is at least one sequence."""
    shape, num_seqs = spec.shape, q.shape[0]
    block_d = triton.next_power_of_2(shape.dim)
    splits = max(1, triton.cdiv(max_seqlen_k, SPLIT))
    parts = (num_seqs, splits, spec.q_heads)
    acc = torch.empty((*parts, shape.dim), dtype=torch.float32, device=q.device)
    peak, total = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
    with torch.cuda.device_of(q):
        attend_split[(shape.heads, splits, num_seqs)](
            q,
            k_pages,
            v_pages,
            acc,
            peak,
            total,
            block_tables,
            seqlens_k,
            spec.scale * LOG2_E,
            splits,
            q.stride(0),
            q.stride(1),
            k_pages.stride(0),
            v_pages.stride(0),
            block_tables.stride(0),
            HEADS=shape.heads,
            GROUP=spec.q_heads // shape.heads,
            D=shape.dim,
            PAGE=shape.page_tokens,
            X=pack_width(k_pages.dtype),
            LAYOUT=layout_code(spec.layout),
            WINDOW=spec.window,
            SPLIT=SPLIT,
            ROWS=ROWS,
            BLOCK_N=BLOCK_N,
            BLOCK_D=block_d,
            num_warps=4,
        )
        merge_splits[(spec.q_heads, num_seqs)](
            out,
            lse if lse is not None else out,
            sinks if sinks is not None else out,
            acc,
            peak,
            total,
            seqlens_k,
            num_seqs,
            splits,
            out.stride(0),
            out.stride(1),
            D=shape.dim,
            WINDOW=spec.window,
            SPLIT=SPLIT,
            BLOCK_D=block_d,
            WANTS_LSE=lse is not None,
            HAS_SINKS=sinks is not None,
            num_warps=1,
        )
