"""The work list of a prefill step, made on the device: every tile of query rows once, the long ones first.

Tiles of nearly the same cost are one class: the longest class comes first, and within a class sequence after sequence,
so that tiles which read the same keys run at the same time. A tile's place is counted, not sorted: within a sequence a
later tile costs at least as much, so how many tiles of a sequence come before a given one has a closed form.

    record of a tile    seq, first query, first token, queries of the sequence, keys of the sequence,
                        first place and length of the run of tiles that are of its class and sequence, 0
"""

import torch
import triton
import triton.language as tl

SPLITS = 4
# Cost classes for each doubling of a tile's cost, a power of two. Programs draw tiles one by one, so the order within a
# class need not even out their work.
CLASSES = 1


@triton.jit
def _cost_class(cost, CLASSES: tl.constexpr):
    """(least, largest) cost of a cost's class."""
    width = tl.full(cost.shape, 1, tl.int32)
    for power in tl.static_range(1, 24):
        width = tl.where(cost >= CLASSES << power, 1 << power, width)
    least = cost // width * width
    return least, least + width - 1


@triton.jit
def _tiles_up_to(keys, cached, kv_len, num_tiles, QUERIES: tl.constexpr):
    """Returns how many tiles of a sequence need at most this number of keys."""
    inner = tl.minimum(tl.maximum(keys - cached, 0) // QUERIES, tl.maximum(num_tiles - 1, 0))
    return tl.where(kv_len <= keys, num_tiles, inner)


@triton.jit
def _lengths(cu_q_ptr, cu_k_ptr, seq, num_seqs, QUERIES: tl.constexpr):
    """First token, queries, keys, cached keys and tiles of sequences; nothing of those that do not exist."""
    ok = seq < num_seqs
    start = tl.load(cu_q_ptr + seq, mask=ok, other=0)
    q_len = tl.load(cu_q_ptr + seq + 1, mask=ok, other=0) - start
    kv_len = tl.load(cu_k_ptr + seq + 1, mask=ok, other=0) - tl.load(cu_k_ptr + seq, mask=ok, other=0)
    return start, q_len, kv_len, kv_len - q_len, (q_len + QUERIES - 1) // QUERIES


@triton.jit(do_not_specialize=["num_seqs", "max_tiles"])
def list_tiles(
    cu_q_ptr,
    cu_k_ptr,
    records_ptr,
    count_ptr,
    num_seqs,
    max_tiles,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CLASSES: tl.constexpr,
    TILES: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Program (s, p) places every p-th block of TILES tiles of sequence s."""
    own = tl.program_id(0)
    start, q_len, kv_len, cached, num_tiles = _lengths(cu_q_ptr, cu_k_ptr, own, num_seqs, QUERIES)
    if (own == 0) & (tl.program_id(1) == 0):
        total = 0
        for first in range(0, num_seqs, SEQS):
            seq = first + tl.arange(0, SEQS)
            _, _, _, _, tiles = _lengths(cu_q_ptr, cu_k_ptr, seq, num_seqs, QUERIES)
            total += tl.sum(tiles, 0)
        tl.store(count_ptr, tl.minimum(total, max_tiles))
    for block in range(tl.program_id(1) * TILES, num_tiles, tl.num_programs(1) * TILES):
        tile = block + tl.arange(0, TILES)
        cost = (tl.minimum(kv_len, cached + (tile + 1) * QUERIES) + KEYS - 1) // KEYS
        least, largest = _cost_class(cost, CLASSES)
        # Of the own sequence: the later tiles of the class come first.
        behind = _tiles_up_to(largest * KEYS, cached, kv_len, num_tiles, QUERIES)
        run = behind - _tiles_up_to((least - 1) * KEYS, cached, kv_len, num_tiles, QUERIES)
        within = behind - 1 - tile
        place = within
        for first in range(0, num_seqs, SEQS):
            seq = first + tl.arange(0, SEQS)
            _, _, other_kv, other_cached, others = _lengths(cu_q_ptr, cu_k_ptr, seq, num_seqs, QUERIES)
            args = (other_cached[None, :], other_kv[None, :], others[None, :], QUERIES)
            upto = _tiles_up_to((largest * KEYS)[:, None], *args)
            below = _tiles_up_to(((least - 1) * KEYS)[:, None], *args)
            earlier = tl.where((seq < own)[None, :], upto - below, 0)
            place += tl.sum(others[None, :] - upto + earlier, 1)
        ok = (tile < num_tiles) & (place < max_tiles)
        record = records_ptr + place * 8
        tl.store(record, own + tl.zeros([TILES], tl.int32), mask=ok)
        tl.store(record + 1, tile * QUERIES, mask=ok)
        tl.store(record + 2, start + tl.zeros([TILES], tl.int32), mask=ok)
        tl.store(record + 3, q_len + tl.zeros([TILES], tl.int32), mask=ok)
        tl.store(record + 4, kv_len + tl.zeros([TILES], tl.int32), mask=ok)
        tl.store(record + 5, place - within, mask=ok)
        tl.store(record + 6, run, mask=ok)


def launch(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    records: torch.Tensor,
    count: torch.Tensor,
    tile_queries: int,
    tile_keys: int,
) -> None:
    """Fills records int32 [max_tiles, RECORD] and the first of count int32 [COUNTERS].

    Reads the lengths on the device only.
    """
    num_seqs = cu_seqlens_q.shape[0] - 1
    with torch.cuda.device_of(records):
        list_tiles[(max(num_seqs, 1), SPLITS)](
            cu_seqlens_q,
            cu_seqlens_k,
            records,
            count,
            num_seqs,
            records.shape[0],
            QUERIES=tile_queries,
            KEYS=tile_keys,
            CLASSES=CLASSES,
            TILES=64,
            SEQS=32,
            num_warps=4,
        )
