"""Measures the tiles of a step for `attend_few`: once for all its layers."""

import torch
import triton
import triton.language as tl

from kernels.prefill_attention.hopper.few import KEY_TILE, MOST_ROW_TILES


@triton.jit(do_not_specialize=["num_records"])
def measure_tiles(
    records_ptr,
    count_ptr,
    extent_ptr,
    num_records,
    HALF_QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Writes the number of tiles, 2 if one has more than 64 rows, else 1, and the most key tiles of one."""
    number = tl.arange(0, TILES)
    at = records_ptr + number * 8
    ok = number < num_records
    first = tl.load(at + 1, mask=ok, other=0)
    q_len = tl.load(at + 3, mask=ok, other=0)
    kv_len = tl.load(at + 4, mask=ok, other=0)
    tiles = tl.load(count_ptr)
    ok = number < tiles
    halves = tl.max(tl.where(ok & (first + HALF_QUERIES < q_len), 2, 1), 0)
    stop = tl.minimum(kv_len, kv_len - q_len + first + 2 * HALF_QUERIES)
    most = tl.max(tl.where(ok, (stop + KEYS - 1) // KEYS, 0), 0)
    tl.store(extent_ptr, tiles)
    tl.store(extent_ptr + 1, halves)
    tl.store(extent_ptr + 2, most)


def launch(records: torch.Tensor, count: torch.Tensor, extent: torch.Tensor, half_queries: int) -> None:
    """Fills extent int32 [3]; of more than MOST_ROW_TILES tiles, which `attend_few` does not compute, with anything."""
    with torch.cuda.device_of(records):
        measure_tiles[(1,)](
            records,
            count,
            extent,
            records.shape[0],
            HALF_QUERIES=half_queries,
            KEYS=KEY_TILE,
            TILES=MOST_ROW_TILES,
            num_warps=1,
        )
