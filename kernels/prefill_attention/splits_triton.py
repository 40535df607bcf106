"""Decides on the device whether a step's tiles are computed whole or by segments of their keys, and lists the units.

Reads the tiles that plan_triton has placed. One program: there are few tiles where a split pays. Units come segment by
segment, so those of all tiles that are not the last of theirs come first, and as many are full.

    unit    seq, first query, first token, queries of the sequence, keys of the sequence, segment,
            segments of all tiles before this one, number of the tile

A split is chosen if programs compute the units in less time than the longest tile takes, in tiles of KEYS keys: a unit
adds FIXED of them, and each segment of the longest tile FOLD hundredths to the fold behind it all.
"""

import torch
import triton
import triton.language as tl

# What a split does with a step: chooses by itself; tests also ask for one of the two ways.
AUTO, WHOLE, SPLIT = 0, 1, 2
# In tiles of 128 keys, 1.4 us each where few programs run (H200): what a unit costs beyond its tiles, and in hundredths
# what a segment costs the fold.
FIXED, FOLD = 2, 70


@triton.jit(do_not_specialize=["max_units", "programs", "mode"])
def list_units(
    records_ptr,
    count_ptr,
    units_ptr,
    num_units_ptr,
    max_units,
    programs,
    mode,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FIXED: tl.constexpr,
    FOLD: tl.constexpr,
    TILES: tl.constexpr,
):
    tiles = tl.load(count_ptr)
    number = tl.arange(0, TILES)
    ok = number < tiles
    at = records_ptr + number * 8
    first = tl.load(at + 1, mask=ok, other=0)
    q_len = tl.load(at + 3, mask=ok, other=0)
    kv_len = tl.load(at + 4, mask=ok, other=0)
    keys = tl.where(ok, tl.minimum(kv_len, kv_len - q_len + first + QUERIES), 0)
    segments = (keys + SEGMENT - 1) // SEGMENT
    before = tl.cumsum(segments, 0) - segments
    total = tl.sum(segments, 0)
    longest = tl.max(segments, 0)
    # By tiles of keys: the longest tile alone, and rounds of whole segments, the fold behind them.
    whole = (tl.max(keys, 0) + KEYS - 1) // KEYS
    rounds = (total * HEADS + programs - 1) // programs
    split = rounds * (SEGMENT // KEYS + FIXED) + longest * FOLD // 100
    can = (tiles <= TILES) & (total <= max_units) & (longest > 1)
    pays = (tiles * HEADS <= programs) & (split < whole)
    chosen = can & ((mode == 2) | ((mode == 0) & pays))
    tl.store(num_units_ptr, tl.where(chosen, total, 0))
    if chosen:
        seq = tl.load(at, mask=ok, other=0)
        token = tl.load(at + 2, mask=ok, other=0)
        placed = 0
        for segment in range(longest):
            here = segments > segment
            unit = units_ptr + (placed + tl.cumsum(here.to(tl.int32), 0) - 1) * 8
            tl.store(unit, seq, mask=here)
            tl.store(unit + 1, first, mask=here)
            tl.store(unit + 2, token, mask=here)
            tl.store(unit + 3, q_len, mask=here)
            tl.store(unit + 4, kv_len, mask=here)
            tl.store(unit + 5, segment + tl.zeros([TILES], tl.int32), mask=here)
            tl.store(unit + 6, before, mask=here)
            tl.store(unit + 7, number, mask=here)
            placed += tl.sum(here.to(tl.int32), 0)


def launch(
    records: torch.Tensor,
    count: torch.Tensor,
    units: torch.Tensor,
    num_units: torch.Tensor,
    *,
    heads: int,
    tile_queries: int,
    tile_keys: int,
    segment: int,
    programs: int,
    max_tiles: int,
    mode: int = AUTO,
) -> None:
    """Fills units int32 [max_units, UNIT] and num_units int32 [1]; 0 where tiles are computed whole.

    `max_tiles` is a power of two: steps of more tiles are never split.
    """
    with torch.cuda.device_of(records):
        list_units[(1,)](
            records,
            count,
            units,
            num_units,
            units.shape[0],
            programs,
            mode,
            HEADS=heads,
            QUERIES=tile_queries,
            KEYS=tile_keys,
            SEGMENT=segment,
            FIXED=FIXED,
            FOLD=FOLD,
            TILES=max_tiles,
            num_warps=4,
        )
