"""The merge of decode_attention's splits in Triton: one program for one query head of one token."""

import torch
import triton
import triton.language as tl

from kernels.addressing.triton import query_span
from kernels.decode_attention.call import DecodeCall
from kernels.softmax.triton import LN_2, LOG2_E, NO_KEYS


@triton.jit(do_not_specialize=["num_tokens", "max_splits"])
def merge_splits(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    seqlens_ptr,
    cu_q_ptr,
    num_tokens,
    max_splits,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    GQA_GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    WANTS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    start, tokens, length = query_span(cu_q_ptr, seqlens_ptr, seq, HAS_SPANS)
    if token >= tokens:
        return
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - tokens - WINDOW + 1, 0)
    d = tl.arange(0, BLOCK_D)
    row_max = tl.full([], NO_KEYS, tl.float32)
    row_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in tl.range(lowest // SPLIT, tl.cdiv(length, SPLIT)):
        part = (
            ((seq * max_splits + split) * HEADS + head // GQA_GROUP) * (TOKENS * GQA_GROUP)
            + token * GQA_GROUP
            + head % GQA_GROUP
        )
        part_max = tl.load(row_max_ptr + part)
        new_max = tl.maximum(row_max, part_max)
        decay = tl.exp2(row_max - new_max)
        weight = tl.exp2(part_max - new_max)
        row_sum = row_sum * decay + tl.load(row_sum_ptr + part) * weight
        acc = acc * decay + tl.load(acc_ptr + part * D + d, mask=d < D, other=0.0) * weight
        row_max = new_max
    if HAS_SINKS:
        # Here and not in the splits, or it would count once for each of them; a row without keys has none.
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        sink = tl.where(length > 0, sink, float("-inf"))
        new_max = tl.maximum(row_max, sink)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.exp2(sink - new_max)
        acc = acc * decay
        row_max = new_max
    out = tl.div_rn(acc, tl.where(row_sum == 0.0, 1.0, row_sum))
    row = start + token
    out_at = row * stride_out_token + head * stride_out_head + d
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=d < D)
    if WANTS_LSE:
        lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
        tl.store(lse_ptr + head.to(tl.int64) * num_tokens + row, lse)


def merge(
    call: DecodeCall,
    partials: tuple[torch.Tensor, ...],
    splits: int,
    sizes: dict[str, int],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    merge_splits[(call.spec.q_heads, call.max_q_tokens, call.num_seqs)](
        out,
        lse if lse is not None else out,
        call.sinks if call.sinks is not None else out,
        *partials,
        call.seqlens_k,
        call.spans_or_any,
        call.q.shape[0],
        splits,
        *out.stride()[:2],
        WANTS_LSE=lse is not None,
        HAS_SINKS=call.sinks is not None,
        num_warps=1,
        **sizes,
    )
