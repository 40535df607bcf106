"""compressed_attention in Triton: one program for one query and a tile of its heads.

A row's keys are one list, the tokens of its window and then entries, read BLOCK_N at a time; one load serves as keys
and as values, and one softmax is carried over all of them.

    list       0 ............. in window | 0 ....... entries (all that are seen, or the chosen)
    tiles      | BLOCK_N | BLOCK_N | BLOCK_N | BLOCK_N |
"""

import torch
import triton
import triton.language as tl

from kernels import softmax
from kernels.addressing.triton import row_mask
from kernels.compressed_attention.call import CompressedCall
from kernels.errors import KernelArgumentError
from kernels.softmax.triton import LOG2_E, MASKED, NO_KEYS

LEAST_BLOCK = 16  # the least that a product's operand is wide
# Heads of a program: with more, its sums no longer fit in registers.
MOST_HEADS = 64
BLOCK_N = 64
WARPS = 8
# A choice leads to its page and that to the key: one of each is loaded ahead. Keys of two tiles and the queries are
# 192 KiB of shared memory where heads have 512 elements.
STAGES = 4
MAX_DIM = 512


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["stride_tables_seq", "stride_entry_tables_seq"])
def attend_compressed(
    q_ptr,
    pages_ptr,
    entry_pages_ptr,
    tables_ptr,
    entry_tables_ptr,
    sequences_ptr,
    num_keys_ptr,
    num_seen_ptr,
    chosen_ptr,
    sinks_ptr,
    out_ptr,
    scale_log2,
    stride_page,
    stride_entry_page,
    stride_tables_seq,
    stride_entry_tables_seq,
    WINDOW: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    OF_PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    # A query's tiles are neighbours in launch order: they read the same keys.
    head = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    live = head < HEADS
    token = (tl.program_id(0) // TILES).to(tl.int64)
    num_keys = tl.load(num_keys_ptr + token)
    # A row that sees no key may be of no sequence.
    sequence = tl.maximum(tl.load(sequences_ptr + token), 0).to(tl.int64)
    table_ptr = tables_ptr + sequence * stride_tables_seq
    in_window = tl.minimum(num_keys, WINDOW)
    count = in_window
    if HAS_ENTRIES:
        seen = tl.load(num_seen_ptr + token)
        count += tl.minimum(seen, K) if K else seen
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    q_at = (token * HEADS + head) * D
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=row_mask(live, D, BLOCK_D), other=0.0)
    row_max = tl.full([ROWS], NO_KEYS, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        key = start + column
        ok = key < count
        position = num_keys - in_window + key
        page = tl.load(table_ptr + position // PAGE, mask=key < in_window, other=0).to(tl.int64)
        row_ptr = pages_ptr + page * stride_page + position % PAGE * D
        if HAS_ENTRIES:
            is_entry = (key >= in_window) & ok
            entry = key - in_window
            if K:
                entry = tl.load(chosen_ptr + token * K + entry, mask=is_entry, other=0)
            entry_table_ptr = entry_tables_ptr + sequence * stride_entry_tables_seq
            entry_page = tl.load(entry_table_ptr + entry // OF_PAGE, mask=is_entry, other=0).to(tl.int64)
            entry_ptr = entry_pages_ptr + entry_page * stride_entry_page + entry % OF_PAGE * D
            row_ptr = tl.where(is_entry, entry_ptr, row_ptr)
        keys = tl.load(row_ptr[:, None] + d[None, :], mask=row_mask(ok, D, BLOCK_D), other=0.0)
        scores = tl.where(ok[None, :], tl.dot(q, tl.trans(keys)), MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(keys.dtype), keys, acc * decay[:, None])
        row_max = new_max
    # A sink is in the sum of weights, once, and adds no value.
    sink = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E
    new_max = tl.maximum(row_max, sink)
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.exp2(sink - new_max)
    share = decay / tl.where(row_sum == 0.0, 1.0, row_sum)
    out_at = (token * HEADS + head) * D
    out = (acc * share[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + d[None, :], out, mask=row_mask(live, D, BLOCK_D))


def check_dims(call: CompressedCall) -> None:
    """Refuses rows whose tiles do not fit in shared memory."""
    if call.q.shape[2] > MAX_DIM:
        raise KernelArgumentError(f"q: heads must have at most {MAX_DIM} elements, got {call.q.shape[2]}")


def launch(call: CompressedCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    q, pages, tables, entries = call.q, call.window_pages, call.window_tables, call.entries
    tokens, heads, dim = q.shape
    chosen = None if entries is None else entries.chosen
    entry_pages, entry_tables = (pages, tables) if entries is None else (entries.pages, entries.tables)
    rows = min(max(triton.next_power_of_2(heads), LEAST_BLOCK), MOST_HEADS)
    with torch.cuda.device_of(q):
        attend_compressed[(triton.cdiv(heads, rows) * tokens,)](
            q,
            pages,
            entry_pages,
            tables,
            entry_tables,
            *call.rows,
            call.rows.num_keys if entries is None else entries.num_seen,
            call.rows.num_keys if chosen is None else chosen,
            call.sinks,
            out,
            call.scale * softmax.LOG2_E,
            pages.stride(0),
            entry_pages.stride(0),
            tables.stride(0),
            entry_tables.stride(0),
            WINDOW=call.window_tokens,
            HAS_ENTRIES=entries is not None,
            K=0 if chosen is None else chosen.shape[1],
            HEADS=heads,
            D=dim,
            PAGE=pages.shape[1],
            OF_PAGE=entry_pages.shape[1],
            ROWS=rows,
            BLOCK_N=BLOCK_N,
            BLOCK_D=max(triton.next_power_of_2(dim), LEAST_BLOCK),
            STAGES=STAGES,
            num_warps=WARPS,
        )
