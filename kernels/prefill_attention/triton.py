"""prefill_attention in Triton: one program for one tile of a sequence's queries and one kv head.

Key tiles start at absolute multiples of BLOCK_N, every tile passes through one loop body, and a tile that a row does
not see leaves that row's state bit for bit as it was: so a token's result does not depend on how its prompt was cut or
on other requests.

    rows of a tile: BLOCK_M // GQA_GROUP queries, each with its GQA_GROUP query heads: they share the tile's keys

               keys  0 ........ first ............ cached ....... last        first: where the tile's window begins
    query 0          | hidden   |  visible to all     | diagonal  |           last:  behind the last query's own key
"""

import torch
import triton
import triton.language as tl

from kernels import softmax
from kernels.addressing import layout_index
from kernels.addressing.triton import load_keys_values
from kernels.fp8 import ScaleKind
from kernels.layout import pack_width
from kernels.prefill_attention.call import PrefillCall
from kernels.softmax.triton import LN_2, LOG2_E


def tile_shape(dim: int, wide: bool) -> tuple[int, int]:
    """(rows, keys) of a tile: as many as eight warps hold in registers.

    `wide` is what needs more of them: fp32, or a scale for each token. Nothing else decides, for the order of the sums
    depends on it.
    """
    if dim <= 128:
        return 128, 64
    return (64 if wide else 128), 32


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_tile(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    cu_q_ptr,
    cu_k_ptr,
    scale_log2,
    cap_log2,
    num_tokens,
    stride_q_token,
    stride_q_group,
    stride_q_head,
    stride_k_page,
    stride_v_page,
    stride_k_scales_page,
    stride_v_scales_page,
    stride_out_token,
    stride_out_head,
    stride_tables_seq,
    HEADS: tl.constexpr,
    GQA_GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    X: tl.constexpr,
    LAYOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    WANTS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CAP: tl.constexpr,
    SCALES: tl.constexpr,
):
    QUERIES: tl.constexpr = BLOCK_M // GQA_GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first: the card's last wave is then a short one
    seq = tl.program_id(2)
    q_start = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - q_start
    if tile * QUERIES >= q_len:
        return
    kv_len = tl.load(cu_k_ptr + seq + 1) - tl.load(cu_k_ptr + seq)
    cached = kv_len - q_len

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    query = tile * QUERIES + row // GQA_GROUP
    head = kv_head * GQA_GROUP + row % GQA_GROUP
    live = (row < QUERIES * GQA_GROUP) & (query < q_len)
    position = cached + query
    token = (q_start + query).to(tl.int64)
    q_row = token * stride_q_token + kv_head.to(tl.int64) * stride_q_group + row % GQA_GROUP * stride_q_head
    q_at = q_row[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)

    last = tl.minimum(kv_len, cached + (tile + 1) * QUERIES)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(cached + tile * QUERIES - WINDOW + 1, 0)
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_tables_seq
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    factor = scale_log2
    if CAP:
        factor = cap_log2
    if SCALES == 1:
        factor *= tl.load(k_scales_ptr)
    for start in tl.range(lowest // BLOCK_N * BLOCK_N, last, BLOCK_N, num_stages=STAGES):
        key = start + column
        # Keys that no row of the tile sees are not read: their pages may be gone, and 0 * NaN would not be 0.
        ok = key < last
        if WINDOW > 0:
            ok = ok & (key >= lowest)
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
            # The queries' dtype holds every e4m3 value; the scales stay in fp32.
            k = k.to(tl.float32).to(q.dtype)
            v = v.to(tl.float32).to(q.dtype)
        scores = tl.dot(q, k) * factor
        if SCALES == 2:
            scale_at = kv_head * PAGE + slot
            k_scale = tl.load(k_scales_ptr + page * stride_k_scales_page + scale_at, mask=ok, other=0.0)
            scores *= k_scale[None, :]
        if CAP:
            # tanh as 1 - 2 / (exp(2 x) + 1): the hardware's own is too coarse for a logit.
            scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * scale_log2
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        if SCALES == 2:
            v_scale = tl.load(v_scales_ptr + page * stride_v_scales_page + scale_at, mask=ok, other=0.0)
            weights *= v_scale[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        row_max = new_max

    if HAS_SINKS:
        # Once, behind the last key: the sink has no value, so it only adds to the row_sum.
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        new_max = tl.maximum(row_max, sink)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.exp2(sink - new_max)
        acc = acc * decay[:, None]
        row_max = new_max
    if SCALES == 1:
        acc *= tl.load(v_scales_ptr)
    out = tl.div_rn(acc, tl.where(row_sum == 0.0, 1.0, row_sum)[:, None])
    out_at = token[:, None] * stride_out_token + head[:, None] * stride_out_head + d[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    if WANTS_LSE:
        lse = (row_max + tl.log2(row_sum)) * LN_2
        tl.store(lse_ptr + head.to(tl.int64) * num_tokens + token, lse, mask=live)


def launch(call: PrefillCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launches over checked, non-empty arguments."""
    q, k_pages, v_pages, spec, sinks = call.q, call.k_pages, call.v_pages, call.spec, call.sinks
    shape, group, scales = spec.shape, spec.group, spec.scales
    by_token = scales is not None and scales.kind is ScaleKind.PER_TOKEN
    rows, keys = tile_shape(shape.dim, q.dtype is torch.float32 or by_token)
    grid = (shape.heads, triton.cdiv(call.max_seqlen_q, rows // group), call.num_seqs)
    strides = (
        (q.stride(1), q.stride(0), q.stride(2)) if q.dim() == 4 else (q.stride(0), group * q.stride(1), q.stride(1))
    )
    with torch.cuda.device_of(q):
        attend_tile[grid](
            q,
            k_pages,
            v_pages,
            out,
            lse if lse is not None else out,
            sinks if sinks is not None else out,
            scales.k if scales else out,
            scales.v if scales else out,
            call.block_tables,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            (spec.softcap or spec.scale) * softmax.LOG2_E,
            2.0 * softmax.LOG2_E * spec.scale / spec.softcap if spec.softcap else 0.0,
            out.shape[0],
            *strides,
            k_pages.stride(0),
            v_pages.stride(0),
            scales.k.stride(0) if scales else 0,
            scales.v.stride(0) if scales else 0,
            out.stride(0),
            out.stride(1),
            call.block_tables.stride(0),
            HEADS=shape.heads,
            GQA_GROUP=group,
            D=shape.dim,
            PAGE=shape.page_tokens,
            X=pack_width(k_pages.dtype),
            LAYOUT=layout_index(spec.layout),
            WINDOW=spec.window,
            BLOCK_M=rows,
            BLOCK_N=keys,
            BLOCK_D=triton.next_power_of_2(shape.dim),
            STAGES=2,
            WANTS_LSE=lse is not None,
            HAS_SINKS=sinks is not None,
            CAP=spec.softcap > 0.0,
            SCALES=scales.kind.value if scales else 0,
            num_warps=8,
        )
