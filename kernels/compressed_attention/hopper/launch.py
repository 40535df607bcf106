"""Launches compressed_attention's Gluon kernels: one for many rows, one for few, with the same bits."""

from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.compressed_attention.call import CompressedCall, most_keys
from kernels.compressed_attention.hopper.kernel import attend_window_and_entries
from kernels.compressed_attention.hopper.phases import FOLD, VALUES, WEIGHTS, attend_in_phases
from kernels.device import num_multiprocessors
from kernels.softmax import LOG2_E

# Heads and keys of a tile, and tiles of keys on their way.
ROWS, TILE, STAGES = 64, 64, 2
# Keys of a piece: sums are made for each and folded in ascending order, so bits follow from it and a launch cannot
# choose. 128 tokens and 1,024 entries are one. On an H200, microseconds with pieces of 320, 640, 1,024 and 1,152, 128
# heads, 2,048 new tokens: 512 entries 955, 814, 809, 808; 1,024 entries 1,693, 1,415, 1,412, 1,257.
PIECE = 1152
# Tiles of heads of a launch, times the pieces that their lists may have, up to which `attend_few_rows` takes it.
# Microseconds there, when it took 1 to 2 more, and in `attend_rows`, H200, 128 heads: 2 tiles with 512 entries 10.9 and
# 31.7; 16 tiles 26.1 and 31.9, with 1,024 entries 47.0 and 46.0. With tables for 1,048,576 tokens and all entries of
# 128, which are lists of up to 8 pieces, there and split: 2 tiles of 65,536 tokens 12.3 and 31.5, of 1,048,576 44.6 and
# 48.3; 8 tiles 33.1 and 31.8, 158 and 50.
MOST_TILES = 16
# Partial results of a launch whose pieces are programs of their own: 128 MiB of them.
MOST_PARTS = 1024
PARTS = 8  # of the columns
# Keys of lists up to which `least_piece` is smaller. There two programs share a multiprocessor.
MOST_SHORT = 640
# Keys of a program of the first launch, with lists up to MOST_SHORT and beyond, and heads of one of the second, the
# least where no program waits for another's place: those of the second launch read lists and keys while the first one
# makes weights. Microseconds of one row on an H200 with (32, 8), (32, 16), (64, 8) and (64, 16): 512 entries, 128 heads
# 9.8, 10.1, 11.0 and 9.8, 64 heads 9.6, 9.4, 9.8 and 10.1; 1,024 entries, 128 heads 13.1, 13.6, 13.8 and 11.3, 64
# heads 10.6, 10.8, 10.4 and 11.1. Two rows of 128 heads with 1,024 entries take 14.2 with 16 heads, 14.9 with 32.
SHORT_KEYS, LONG_KEYS = 32, 64
LEAST_GROUP, GROUP = 8, 16


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
                q, *keys, call.sinks, out, acc, row_max, *[acc] * 2, row_sum, call.rows.num_keys, 0.0, 0, pieces,
                *strides, PHASE=FOLD.value, PIECE=PIECE, KEYS=1, GROUP=1, ARRIVALS=1, WARPS=1, num_warps=1,
                launch_pdl=True, **sizes,
            )  # fmt: skip


def attend_few_rows(call: CompressedCall, out: torch.Tensor) -> None:
    """The same bits, tiles of keys and groups of heads side by side."""
    q, piece = call.q, least_piece(call)
    tokens, heads, _ = q.shape
    key_tiles, pieces = triton.cdiv(most_keys(call), TILE), triton.cdiv(most_keys(call), piece)
    tiles = triton.cdiv(heads, ROWS) * key_tiles
    of_program = SHORT_KEYS if piece <= MOST_SHORT else LONG_KEYS
    halves, others = TILE // of_program, 0 if piece <= MOST_SHORT else tokens * tiles
    group = group_of(heads, tokens * PARTS * pieces, num_multiprocessors(q.device) - others)
    parts = triton.cdiv(heads, group) * PARTS

    def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((tokens, *shape), dtype=dtype, device=q.device)

    weights = buffer(tiles, ROWS, TILE, dtype=q.dtype)
    row_max, sums = (buffer(tiles, halves, ROWS) for _ in range(2))
    shared = pieces if pieces > 1 else 0
    acc, row_sum = buffer(parts, shared, TILE, group), buffer(parts, shared, 2, group)
    arrivals = buffer(triton.next_power_of_2(parts), dtype=torch.int32)
    keys, strides, sizes = arguments(call)
    phases = ((WEIGHTS, (tiles * halves, tokens)), (VALUES, (parts, tokens, pieces)))
    with torch.cuda.device_of(q):
        for phase, grid in phases:
            attend_in_phases[grid](
                q, *keys, call.sinks, out, weights, row_max, sums, acc, row_sum, arrivals, call.scale * LOG2_E,
                key_tiles, pieces, *strides, PHASE=phase.value, PIECE=piece, KEYS=of_program, GROUP=group,
                ARRIVALS=arrivals.shape[1], WARPS=4, num_warps=4, launch_pdl=True, **sizes,
            )  # fmt: skip


def group_of(heads: int, parts: int, multiprocessors: int) -> int:
    """Returns how many heads a program of the last launch has; `parts` are the programs that a group of heads has."""
    return LEAST_GROUP if parts * triton.cdiv(heads, LEAST_GROUP) <= multiprocessors else GROUP


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
