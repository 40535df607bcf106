"""index_logits in Triton: one program for a block of keys and a tile of rows, whose sequences it takes in turn.

A block of keys is read once for all rows of a sequence. A logit is one product over the dimensions and one sum over
heads, in the same shape whatever the tile: its bits depend on its query and its key alone.

A small launch, where each row is another sequence's, has programs for one row and a span of keys instead.

    rows of a tile   | s 3 | s 4 | s 5, s 5, s 5, ... |     a run for each sequence
    key blocks       0 .... BLOCK_N .... 2 BLOCK_N ...      those behind the last key of a run are passed over
"""

import torch
import triton
import triton.language as tl

from kernels.addressing.triton import row_mask
from kernels.index_logits.call import IndexLogitsCall

LEAST_BLOCK = 16  # the least that a product's operand is wide
BLOCK_N = 128
WARPS = 4
TILE_ROWS = 16
# Keys that a program of a small launch takes, BLOCK_N at a time; fewer where programs are few.
SPAN, SHORT_SPAN = 1024, 256
SHORT_LAUNCH_LOGITS = 1 << 20
LARGE_LAUNCH = 256
# Queries of a large launch are loaded two ahead; keys of a small one, behind their page's number, one ahead.
STAGES, SPAN_STAGES = 3, 4


@triton.jit
def load_keys(pages_ptr, table_ptr, key, ok, stride_page, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys [n, BLOCK_D] at positions [n] of a sequence, zeros where not ok, and their pages."""
    d = tl.arange(0, BLOCK_D)
    page = tl.load(table_ptr + key // PAGE, mask=ok, other=0).to(tl.int64)
    at = page * stride_page + (key % PAGE) * DIM
    keys = tl.load(pages_ptr + at[:, None] + d[None, :], mask=row_mask(ok, DIM, BLOCK_D), other=0.0)
    return keys, page


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@triton.jit(
    do_not_specialize=["num_rows", "max_keys", "least_keys", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def score_keys(
    q_ptr,
    weights_ptr,
    pages_ptr,
    scales_ptr,
    tables_ptr,
    sequences_ptr,
    num_keys_ptr,
    out_ptr,
    num_rows,
    max_keys,
    least_keys,
    stride_q_token,
    stride_weights_token,
    stride_page,
    stride_scales_page,
    stride_tables_seq,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    STAGES: tl.constexpr,
):
    first_key = tl.program_id(0) * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64) * ROWS
    stop = tl.minimum(row + ROWS, num_rows)
    tile_row = row + tl.arange(0, ROWS)
    tile_sequence = tl.load(sequences_ptr + tile_row, mask=tile_row < num_rows, other=-2)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    needed = tl.maximum(first_key, least_keys)
    while row < stop:
        sequence = tl.load(sequences_ptr + row)
        end = row + tl.sum(((tile_sequence == sequence) & (tile_row >= row)).to(tl.int32), 0)
        # The last row of a run sees most.
        most = tl.minimum(tl.load(num_keys_ptr + end - 1), max_keys)
        if most > needed:
            table_ptr = tables_ptr + sequence.to(tl.int64) * stride_tables_seq
            ok = key < most
            keys, page = load_keys(pages_ptr, table_ptr, key, ok, stride_page, PAGE, DIM, BLOCK_D)
            if HAS_SCALES:
                scale = tl.load(scales_ptr + page * stride_scales_page + key % PAGE, mask=ok, other=0.0)
            # Nothing here depends on a row's count but what is stored, so that queries are loaded ahead.
            for token in tl.range(row, end, num_stages=STAGES):
                count = tl.minimum(tl.load(num_keys_ptr + token), max_keys)
                q_at = token * stride_q_token + h[:, None] * DIM + d[None, :]
                q = tl.load(q_ptr + q_at, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
                weight = tl.load(weights_ptr + token * stride_weights_token + h, mask=h < HEADS, other=0.0)
                scores = tl.maximum(tl.dot(keys, tl.trans(q)), 0.0)
                logits = tl.sum(scores * weight[None, :], 1)
                if HAS_SCALES:
                    logits = logits * scale
                tl.store(out_ptr + token * max_keys + key, logits, mask=(key < count) & (count > needed))
        row = end


@triton.jit(
    do_not_specialize=["max_keys", "least_keys", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def score_span(
    q_ptr,
    weights_ptr,
    pages_ptr,
    scales_ptr,
    tables_ptr,
    sequences_ptr,
    num_keys_ptr,
    out_ptr,
    max_keys,
    least_keys,
    stride_q_token,
    stride_weights_token,
    stride_page,
    stride_scales_page,
    stride_tables_seq,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * SPAN
    token = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(num_keys_ptr + token), max_keys)
    if count > tl.maximum(first, least_keys):
        table_ptr = tables_ptr + tl.load(sequences_ptr + token).to(tl.int64) * stride_tables_seq
        h = tl.arange(0, BLOCK_H)
        d = tl.arange(0, BLOCK_D)
        q_at = token * stride_q_token + h[:, None] * DIM + d[None, :]
        q = tl.load(q_ptr + q_at, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
        weight = tl.load(weights_ptr + token * stride_weights_token + h, mask=h < HEADS, other=0.0)
        for start in tl.range(first, tl.minimum(first + SPAN, count), BLOCK_N, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_N)
            ok = key < count
            keys, page = load_keys(pages_ptr, table_ptr, key, ok, stride_page, PAGE, DIM, BLOCK_D)
            scores = tl.maximum(tl.dot(keys, tl.trans(q)), 0.0)
            logits = tl.sum(scores * weight[None, :], 1)
            if HAS_SCALES:
                scale = tl.load(scales_ptr + page * stride_scales_page + key % PAGE, mask=ok, other=0.0)
                logits = logits * scale
            tl.store(out_ptr + token * max_keys + key, logits, mask=ok)


def launch(call: IndexLogitsCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    (tokens, heads, dim), pages, scales = call.q.shape, call.pages, call.scales
    tensors = (
        call.q,
        call.weights,
        pages,
        call.weights if scales is None else scales,
        call.block_tables,
        call.rows.sequences,
        call.rows.num_keys,
        out,
    )
    limits = (call.max_keys, call.least_keys)
    strides = (
        call.q.stride(0),
        call.weights.stride(0),
        pages.stride(0),
        0 if scales is None else scales.stride(0),
        call.block_tables.stride(0),
    )
    constants = {
        "HEADS": heads,
        "DIM": dim,
        "PAGE": pages.shape[1],
        "BLOCK_N": BLOCK_N,
        "BLOCK_H": max(triton.next_power_of_2(heads), LEAST_BLOCK),
        "BLOCK_D": max(triton.next_power_of_2(dim), LEAST_BLOCK),
        "HAS_SCALES": scales is not None,
        "num_warps": WARPS,
    }
    with torch.cuda.device_of(call.q):
        if tokens >= LARGE_LAUNCH:
            score_keys[(triton.cdiv(call.max_keys, BLOCK_N), triton.cdiv(tokens, TILE_ROWS))](
                *tensors, tokens, *limits, *strides, **constants, ROWS=TILE_ROWS, STAGES=STAGES
            )
        else:
            span = SPAN if tokens * call.max_keys > SHORT_LAUNCH_LOGITS else SHORT_SPAN
            score_span[(triton.cdiv(call.max_keys, span), tokens)](
                *tensors, *limits, *strides, **constants, SPAN=span, STAGES=SPAN_STAGES
            )
