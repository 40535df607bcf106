"""compressed_attention in Triton: a query and a tile of its heads over the row's keys, piece by piece.

A row's keys are one list, the tokens of its window and then entries, read BLOCK_N at a time; one load serves as keys
and as values. Each PIECE of the list has a softmax of its own, and pieces are folded in ascending order: where rows
are many, by one program that keeps the sum so far in memory, where they are few, each piece by its own program and
the sum by a second launch. Both compute the same, so which of them runs changes no bit.

    list       0 ............. in window | 0 ....... entries (all that are seen, or the chosen)
    pieces     |         0         |         1         |    2    |
"""

import torch
import triton
import triton.language as tl

from kernels import softmax
from kernels.addressing.triton import row_mask
from kernels.compressed_attention.call import CompressedCall, most_keys
from kernels.compressed_attention.merge_triton import finished, fold_pieces, folded, listed
from kernels.errors import KernelArgumentError
from kernels.softmax.triton import MASKED, NO_KEYS

LEAST_BLOCK = 16  # the least that a product's operand is wide
# Heads of a program: with more, its sums no longer fit in registers.
MOST_HEADS = 64
BLOCK_N = 64
# Keys of a piece: two of them are a window of 128 and 512 entries. For each piece a running total of 128 KB is read and
# written once.
PIECE = 320
WARPS = 8
# A choice leads to its page and that to the key: one of each is loaded ahead. Keys of two tiles and the queries are
# 192 KiB of shared memory where heads have 512 elements.
STAGES = 4
MAX_DIM = 512
# Partial results of a launch of few rows: 128 MiB of them.
MOST_PARTS = 1024
# Programs where there is no GPU: few, so that one takes several rows.
INTERPRETED_PROGRAMS = 4


@triton.jit
def attend_piece(
    q,
    first,
    last,
    row,
    pages,
    tables,
    chosen_ptr,
    scale_log2,
    RATIO: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    OF_PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns the softmax state of queries [ROWS, BLOCK_D] over keys `first` to `last` of the row's list.

    Sums of products are written as one operation each, so that no compilation rounds them otherwise than another.
    """
    ROWS: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    num_keys, in_window = row
    pages_ptr, entry_pages_ptr, stride_page, stride_entry_page = pages
    table_ptr, entry_table_ptr = tables
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    row_max = tl.full([ROWS], NO_KEYS, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        key = start + column
        ok = key < last
        # A tile may hold both kinds, so a key's table, page and place in it are chosen before its page is loaded.
        place = num_keys - in_window + key
        slot = place % PAGE
        at = table_ptr + place // PAGE
        if RATIO:
            is_entry = key >= in_window
            entry = key - in_window
            if K:
                entry = tl.load(chosen_ptr + entry, mask=ok & is_entry, other=0)
            slot = tl.where(is_entry, entry % OF_PAGE, slot)
            at = tl.where(is_entry, entry_table_ptr + entry // OF_PAGE, at)
        page = tl.load(at, mask=ok, other=0).to(tl.int64)
        row_ptr = pages_ptr
        stride = stride_page
        if RATIO:
            row_ptr = tl.where(is_entry, entry_pages_ptr, pages_ptr)
            stride = tl.where(is_entry, stride_entry_page, stride_page)
        row_ptr += page * stride + slot * D
        keys = tl.load(row_ptr[:, None] + d[None, :], mask=row_mask(ok, D, BLOCK_D), other=0.0)
        scores = tl.where(ok[None, :], tl.dot(q, tl.trans(keys)), MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        blank = tl.zeros_like(scores)
        weights = tl.exp2(tl.fma(scores, blank + scale_log2, blank - new_max[:, None]))
        decay = tl.exp2(row_max - new_max)
        row_sum = tl.fma(row_sum, decay, tl.sum(weights, 1))
        acc = tl.dot(weights.to(keys.dtype), keys, acc * decay[:, None])
        row_max = new_max
    return acc, row_max, row_sum


# What changes from batch to batch is not specialised on: a new value, or rows that begin elsewhere, must not mean a new
# compilation.
@triton.jit(
    do_not_specialize=["num_items", "max_pieces", "stride_tables_seq", "stride_entry_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def attend_compressed(
    q_ptr,
    pages_ptr,
    entry_pages_ptr,
    tables_ptr,
    entry_tables_ptr,
    sequences_ptr,
    num_keys_ptr,
    chosen_ptr,
    sinks_ptr,
    out_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    scale_log2,
    num_items,
    max_pieces,
    stride_page,
    stride_entry_page,
    stride_tables_seq,
    stride_entry_tables_seq,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    OF_PAGE: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    d = tl.arange(0, BLOCK_D)
    row = tl.arange(0, ROWS)
    inside = row[:, None] * BLOCK_D + d[None, :]
    last_item = num_items
    if SPLITS:
        last_item = tl.program_id(0) + 1
    # A query's tiles are neighbours: their programs read the same keys at the same time.
    for item in tl.range(tl.program_id(0), last_item, tl.num_programs(0)):
        head = item % TILES * ROWS + row
        live = head < HEADS
        token = tl.zeros([], tl.int64) + item // TILES
        num_keys, in_window, count = listed(num_keys_ptr, token, WINDOW, RATIO, K)
        # A row that sees no key may be of no sequence.
        sequence = tl.maximum(tl.load(sequences_ptr + token), 0).to(tl.int64)
        pages = (pages_ptr, entry_pages_ptr, stride_page, stride_entry_page)
        tables = (tables_ptr + sequence * stride_tables_seq, entry_tables_ptr + sequence * stride_entry_tables_seq)
        row_at = (token * HEADS + head)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + row_at, mask=row_mask(live, D, BLOCK_D), other=0.0)
        begin = 0
        end = tl.maximum(count, 1)
        if SPLITS:
            begin = tl.program_id(1) * PIECE
            end = tl.minimum(end, begin + PIECE)
        row_max = tl.full([ROWS], NO_KEYS, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        for first in tl.range(begin, end, PIECE):
            acc, part_max, part_sum = attend_piece(
                q, first, tl.minimum(count, first + PIECE), (num_keys, in_window), pages, tables,
                chosen_ptr + token * K, scale_log2, RATIO, K, D, PAGE, OF_PAGE, BLOCK_N, STAGES,
            )  # fmt: skip
            if SPLITS:
                slot = tl.program_id(0).to(tl.int64) * max_pieces + tl.program_id(1)
                tl.store(acc_ptr + slot * (ROWS * BLOCK_D) + inside, acc)
                tl.store(row_max_ptr + slot * ROWS + row, part_max)
                tl.store(row_sum_ptr + slot * ROWS + row, part_sum)
            else:
                sum_ptr = acc_ptr + tl.program_id(0).to(tl.int64) * (ROWS * BLOCK_D) + inside
                if first > 0:
                    tl.debug_barrier()
                    acc, row_max, row_sum = folded(tl.load(sum_ptr), row_max, row_sum, acc, part_max, part_sum)
                    tl.debug_barrier()
                else:
                    row_max = part_max
                    row_sum = part_sum
                if first + PIECE < end:
                    tl.store(sum_ptr, acc)
                else:
                    sink = tl.load(sinks_ptr + head, mask=live, other=0.0)
                    out = finished(acc, row_max, row_sum, sink).to(out_ptr.dtype.element_ty)
                    tl.store(out_ptr + row_at, out, mask=row_mask(live, D, BLOCK_D))


def check_dims(call: CompressedCall) -> None:
    """Refuses rows whose tiles do not fit in shared memory."""
    if call.q.shape[2] > MAX_DIM:
        raise KernelArgumentError(f"q: heads must have at most {MAX_DIM} elements, got {call.q.shape[2]}")


def launch(call: CompressedCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    q, pages, tables, entries = call.q, call.window_pages, call.window_tables, call.entries
    tokens, heads, _ = q.shape
    chosen = None if entries is None else entries.chosen
    entry_pages, entry_tables = (pages, tables) if entries is None else (entries.pages, entries.tables)
    sizes = constants(call)
    rows, pieces = sizes["ROWS"], triton.cdiv(most_keys(call), PIECE)
    items, programs = tokens * triton.cdiv(heads, rows), num_programs(q.device, rows)
    splits = is_split(items, pieces, programs)
    slots = items * pieces if splits else min(items, programs) if pieces > 1 else 0
    acc = torch.empty((slots, rows, sizes["BLOCK_D"]), dtype=torch.float32, device=q.device)
    partials = (acc, *(torch.empty((slots, rows), dtype=torch.float32, device=q.device) for _ in range(2)))
    with torch.cuda.device_of(q):
        attend_compressed[(items, pieces) if splits else (min(items, programs),)](
            q,
            pages,
            entry_pages,
            tables,
            entry_tables,
            *call.rows,
            tables if chosen is None else chosen,
            call.sinks,
            out,
            *partials,
            call.scale * softmax.LOG2_E,
            items,
            pieces,
            pages.stride(0),
            entry_pages.stride(0),
            tables.stride(0),
            entry_tables.stride(0),
            SPLITS=splits,
            PAGE=pages.shape[1],
            OF_PAGE=entry_pages.shape[1],
            BLOCK_N=BLOCK_N,
            STAGES=STAGES,
            num_warps=WARPS,
            **sizes,
        )
        if splits:
            fold_pieces[(tokens * heads,)](call.rows.num_keys, call.sinks, out, *partials, pieces, num_warps=1, **sizes)


def constants(call: CompressedCall) -> dict[str, int]:
    """Returns what both kernels know of a call when they are compiled."""
    (_, heads, dim), entries = call.q.shape, call.entries
    return {
        "WINDOW": call.window_tokens,
        "RATIO": 0 if entries is None else entries.ratio,
        "K": 0 if entries is None or entries.chosen is None else entries.chosen.shape[1],
        "HEADS": heads,
        "D": dim,
        "PIECE": PIECE,
        "ROWS": min(max(triton.next_power_of_2(heads), LEAST_BLOCK), MOST_HEADS),
        "BLOCK_D": max(triton.next_power_of_2(dim), LEAST_BLOCK),
    }


def num_programs(device: torch.device, rows: int) -> int:
    """Returns how many programs with this number of heads each a device runs at a time."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    multiprocessors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return multiprocessors if rows > LEAST_BLOCK else 2 * multiprocessors


def is_split(items: int, pieces: int, programs: int) -> bool:
    """Whether each piece has a program of its own: where queries leave half of the device without work."""
    return 1 < pieces <= MOST_PARTS // items and 2 * items <= programs
