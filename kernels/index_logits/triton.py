"""index_logits in Triton: one program for a block of keys and a tile of rows, whose sequences it takes in turn.

A block of keys is read once for all rows of a sequence. A logit is one product over the dimensions and one sum over
heads, in the same shape whatever the tile: its bits depend on its query and its key alone.

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
# Rows of a tile: of a large launch, mostly a prompt's; of a small one, where each row is another sequence's.
MANY_ROWS, FEW_ROWS = 16, 1
LARGE_LAUNCH = 256


@triton.jit
def load_keys(pages_ptr, table_ptr, key, ok, stride_page, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys [n, BLOCK_D] at positions [n] of a sequence, and their pages; what is not ok may be anything."""
    d = tl.arange(0, BLOCK_D)
    page = tl.load(table_ptr + key // PAGE, mask=ok, other=0).to(tl.int64)
    at = page * stride_page + (key % PAGE) * DIM
    keys = tl.load(pages_ptr + at[:, None] + d[None, :], mask=row_mask(ok, DIM, BLOCK_D))
    return keys, page


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows", "max_keys", "least_keys", "stride_tables_seq"])
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
                keys = keys.to(tl.float32).to(q_ptr.dtype.element_ty)
                scale = tl.load(scales_ptr + page * stride_scales_page + key % PAGE, mask=ok, other=0.0)
            keys = tl.where(ok[:, None] & (d < DIM)[None, :], keys, 0.0)
            for step in tl.range(0, (end - row).to(tl.int32)):
                token = row + step
                count = tl.minimum(tl.load(num_keys_ptr + token), max_keys)
                if count > needed:
                    q_at = token * stride_q_token + h[:, None] * DIM + d[None, :]
                    q = tl.load(q_ptr + q_at, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
                    weight = tl.load(weights_ptr + token * stride_weights_token + h, mask=h < HEADS, other=0.0)
                    scores = tl.maximum(tl.dot(keys, tl.trans(q)), 0.0)
                    logits = tl.sum(scores * weight[None, :], 1)
                    if HAS_SCALES:
                        logits = logits * scale
                    tl.store(out_ptr + token * max_keys + key, logits, mask=key < count)
        row = end


def launch(call: IndexLogitsCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    (tokens, heads, dim), pages, scales = call.q.shape, call.pages, call.scales
    rows = MANY_ROWS if tokens >= LARGE_LAUNCH else FEW_ROWS
    with torch.cuda.device_of(call.q):
        score_keys[(triton.cdiv(call.max_keys, BLOCK_N), triton.cdiv(tokens, rows))](
            call.q,
            call.weights,
            pages,
            call.weights if scales is None else scales,
            call.block_tables,
            call.rows.sequences,
            call.rows.num_keys,
            out,
            tokens,
            call.max_keys,
            call.least_keys,
            call.q.stride(0),
            call.weights.stride(0),
            pages.stride(0),
            0 if scales is None else scales.stride(0),
            call.block_tables.stride(0),
            HEADS=heads,
            DIM=dim,
            PAGE=pages.shape[1],
            ROWS=rows,
            BLOCK_N=BLOCK_N,
            BLOCK_H=max(triton.next_power_of_2(heads), LEAST_BLOCK),
            BLOCK_D=max(triton.next_power_of_2(dim), LEAST_BLOCK),
            HAS_SCALES=scales is not None,
            num_warps=8,
        )
