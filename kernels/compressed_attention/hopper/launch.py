"""Launches compressed_attention's Gluon kernels: one for many rows, one for few, with the same bits."""

from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.compressed_attention.call import CompressedCall, most_keys
from kernels.compressed_attention.hopper.kernel import attend_window_and_entries
from kernels.compressed_attention.hopper.phases import BOTH, FOLD, SCORES, VALUES, WEIGHTS, attend_in_phases
from kernels.device import num_multiprocessors
from kernels.softmax import LOG2_E

# Heads and keys of a tile, and tiles of keys on their way.
ROWS, TILE, STAGES = 64, 64, 2
# Keys of a piece: sums are made for each and folded in ascending order, so bits follow from it and a launch cannot
# choose. 128 tokens and 1,024 entries are one. On an H200, microseconds with pieces of 320, 640, 1,024 and 1,152, 128
# heads, 2,048 new tokens: 512 entries 955, 814, 809, 808; 1,024 entries 1,693, 1,415, 1,412, 1,257.
PIECE = 1152
# Tiles of heads of a launch, times the pieces that their lists may have, up to which `attend_few_rows` takes it.
# Microseconds there and in `attend_rows`, H200, 128 heads: 2 tiles with 512 entries 10.9 and 31.7; 16 tiles 26.1 and
# 31.9, with 1,024 entries 47.0 and 46.0. With tables for 1,048,576 tokens and all entries of 128, which are lists of up
# to 8 pieces, there and split: 2 tiles of 65,536 tokens 12.3 and 31.5, of 1,048,576 44.6 and 48.3; 8 tiles 33.1 and
# 31.8, 158 and 50.
MOST_TILES = 16
# Partial results of a launch whose pieces are programs of their own: 128 MiB of them.
MOST_PARTS = 1024
# Keys of a list up to which the programs that make values make weights too, and heads of these, more where programs
# would be more than multiprocessors. With 8 and 16 heads, and in three launches, 128 heads and 512 entries take 11.0,
# 11.9 and 12.6 us of an H200, two rows 13.3, 12.1 and 13.3; of 1,024 entries two launches took 14.8, three 13.5.
MOST_SHORT = 640
GROUPS_OF_BOTH = (8, 16)
PARTS = 8  # of the columns
# Heads of a program that walks a piece's tiles there. Of 8, 16 and 32 one decoding sequence takes 15.7, 14.4 and 14.5
# us, four take 23.0, 17.5 and 17.1; with 1,024 entries 32 do not fit in shared memory.
GROUP, LEAST_GROUP = 16, 8


def launch(call: CompressedCall, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    tiles, pieces = call.q.shape[0] * triton.cdiv(call.q.shape[1], ROWS), triton.cdiv(most_keys(call), PIECE)
    if is_few(tiles, pieces):
        attend_few_rows(call, out)
    else:
        attend_rows(call, out, splits=is_split(tiles, pieces, num_multiprocessors(call.q.device)))


def is_few(tiles: int, pieces: int) -> bool:
    """Returns whether a launch takes the kernels for few rows.

    `tiles`: tiles of 64 heads of all its rows; `pieces`: how many pieces the longest list may have.
    """
    return tiles * pieces <= MOST_TILES


def is_split(tiles: int, pieces: int, multiprocessors: int) -> bool:
    """Returns whether each piece has a program of its own: where tiles of heads leave half of the device idle."""
    return 1 < pieces <= MOST_PARTS // tiles and 2 * tiles <= multiprocessors


def attend_rows(call: CompressedCall, out: torch.Tensor, *, splits: bool) -> None:
    """Fills out, with the pieces of a list in programs of their own or in one: the bits are the same."""
    q, dim = call.q, call.q.shape[2]
    rows, pieces = q.shape[0] * q.shape[1], triton.cdiv(most_keys(call), PIECE)
    tiles = q.shape[0] * triton.cdiv(q.shape[1], ROWS)
    items = tiles * pieces if splits else tiles
    programs = min(items, num_multiprocessors(q.device))
    # Of lists of several pieces: each one's sums, or those so far.
    slots = items if splits else programs if pieces > 1 else 0
    acc = torch.empty((slots, ROWS, dim), dtype=torch.float32, device=q.device)
    row_max, row_sum = (torch.empty((slots if splits else 0, ROWS), dtype=acc.dtype, device=q.device) for _ in "ab")
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Behind a query's last head come the next one's, whose results are not stored.
    boxes = TensorDescriptor(q, [rows, dim], [dim, 1], [ROWS, dim // 2], layout)
    keys, strides, sizes = arguments(call)
    with torch.cuda.device_of(q):
        attend_window_and_entries[(programs,)](
            boxes, *keys, call.sinks, out, acc, row_max, row_sum, call.scale * LOG2_E, items, pieces, *strides,
            SPLITS=splits, PIECE=PIECE, STAGES=STAGES, num_warps=4, **sizes,
        )  # fmt: skip
        if splits:
            attend_in_phases[(rows,)](
                q, *keys, call.sinks, out, *[acc] * 5, row_max, acc, row_sum, call.rows.num_keys, 0.0, 0, pieces,
                *strides, PHASE=FOLD.value, PIECE=PIECE, KEYS=1, GROUP=1, ARRIVALS=1, num_warps=1, launch_pdl=True,
                **sizes,
            )  # fmt: skip


def attend_few_rows(call: CompressedCall, out: torch.Tensor) -> None:
    """The same bits, tiles of keys and groups of heads side by side."""
    q, piece = call.q, least_piece(call)
    tokens, heads, _ = q.shape
    key_tiles, pieces = triton.cdiv(most_keys(call), TILE), triton.cdiv(most_keys(call), piece)
    tiles = triton.cdiv(heads, ROWS) * key_tiles
    both = heads_of_both(tokens, heads, piece * pieces, num_multiprocessors(q.device))
    group = both or min(GROUP, max(triton.next_power_of_2(heads), LEAST_GROUP))
    parts, halves = triton.cdiv(heads, group) * PARTS, 2 if both else 1

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((tokens, *shape), dtype=dtype, device=q.device)

    scores, peaks = buffer(tiles, ROWS, TILE), buffer(tiles, halves, ROWS)
    weights = buffer(0 if both else tiles, ROWS, TILE, dtype=q.dtype)
    decays, sums, row_max = (buffer(0 if both else tiles, ROWS) for _ in range(3))
    shared = pieces if pieces > 1 else 0
    acc, row_sum = buffer(parts, shared, TILE, group), buffer(parts, shared, group)
    arrivals = buffer(triton.next_power_of_2(parts), dtype=torch.int32)
    keys, strides, sizes = arguments(call)
    phases = [
        (SCORES, (tiles * halves, tokens), 4),
        (WEIGHTS, (tiles, tokens), 4),
        (VALUES, (parts, tokens, pieces), 4),
    ]
    if both:
        phases[1:] = [(BOTH, (parts, tokens), both // 2)]
    with torch.cuda.device_of(q):
        for phase, grid, warps in phases:
            attend_in_phases[grid](
                q, *keys, call.sinks, out, scores, peaks, weights, decays, sums, row_max, acc, row_sum, arrivals,
                call.scale * LOG2_E, key_tiles, pieces, *strides, PHASE=phase.value, PIECE=piece, KEYS=TILE // halves,
                GROUP=group, ARRIVALS=arrivals.shape[1], num_warps=warps, launch_pdl=True, **sizes,
            )  # fmt: skip


def heads_of_both(tokens: int, heads: int, keys: int, multiprocessors: int) -> int | None:
    """Returns how many heads a program has that makes weights and values; None where they are made apart."""
    if keys > MOST_SHORT:
        return None
    some = (group for group in GROUPS_OF_BOTH if tokens * triton.cdiv(heads, group) * PARTS <= multiprocessors)
    return next(some, None)


def least_piece(call: CompressedCall) -> int:
    """Returns a piece's size, less where no list needs as much: programs have room for it. Of tables' width it matters
    only whether lists are short, or a wider one would mean a compilation."""
    entries = call.entries
    if entries is None:
        keys = call.window_tokens
    elif entries.chosen is None:
        return MOST_SHORT if most_keys(call) <= MOST_SHORT else PIECE
    else:
        keys = call.window_tokens + entries.chosen.shape[1]
    return int(min(PIECE, triton.cdiv(keys, TILE) * TILE))


class Arguments(NamedTuple):
    """What both kernels know of a call's keys: where they are, strides of rows and tables, and constants."""

    keys: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    sizes: dict[str, int]


def arguments(call: CompressedCall) -> Arguments:
    """Returns what the kernels are told of a call's keys."""
    dim, pages, tables, entries = call.q.shape[2], call.window_pages, call.window_tables, call.entries
    entry_pages, entry_tables = (pages, tables) if entries is None else (entries.pages, entries.tables)
    chosen = None if entries is None else entries.chosen
    return Arguments(
        (pages, entry_pages, tables, entry_tables, *call.rows, tables if chosen is None else chosen),
        (pages.stride(0) // dim, entry_pages.stride(0) // dim, tables.stride(0), entry_tables.stride(0)),
        {
            "WINDOW": call.window_tokens,
            "RATIO": 0 if entries is None else entries.ratio,
            "K": 0 if chosen is None else chosen.shape[1],
            "HEADS": call.q.shape[1],
            "PAGE": pages.shape[1],
            "OF_PAGE": entry_pages.shape[1],
        },
    )
