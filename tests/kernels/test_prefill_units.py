"""The units of a prefill step: every segment of every tile once, segment by segment, where a split takes less time."""

import pytest
import torch

from kernels.prefill_attention.plan import RECORD
from tests.kernels.test_prefill_work_list import DEVICES, tiles

pytest.importorskip("triton")

from kernels.prefill_attention.splits_triton import AUTO, FIXED, FOLD, SPLIT, WHOLE, launch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [AUTO, WHOLE, SPLIT])
@pytest.mark.parametrize(
    "lengths",
    [
        [(4096, 16)],
        [(32768, 64)],
        [(0, 100)],
        [(65536, 512)],
        [(5000, 3), (0, 40), (20000, 70)],
        [(8192, 1), (0, 8193), (8190, 4)],
        [(1 << 20, 500)],
    ],
)
def test_units_are_every_segment_of_every_tile_once(lengths: list[tuple[int, int]], mode: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    heads, programs, segment, max_tiles, queries, keys = 8, 132, 8192, 256, 32, 128
    listed = tiles(lengths, queries, keys)
    records = torch.tensor([[*row, 0, 0, 0] for row in listed], dtype=torch.int32, device=device)
    count, num_units = (torch.tensor([n], dtype=torch.int32, device=device) for n in (len(listed), -1))
    units = torch.full((132, RECORD), -1, dtype=torch.int32, device=device)
    launch(
        records,
        count,
        units,
        num_units,
        heads=heads,
        tile_queries=queries,
        tile_keys=keys,
        segment=segment,
        programs=programs,
        max_tiles=max_tiles,
        mode=mode,
    )
    seen = [min(kv, kv - new + first + queries) for _, first, _, new, kv in listed]  # (seq, first, token, new, keys)
    counts = [-(-n // segment) for n in seen]
    rows = [
        (s, number, (*row, s, sum(counts[:number]), number))
        for number, row in enumerate(listed)
        for s in range(counts[number])
    ]
    rounds = -(-len(rows) * heads // programs)
    split = rounds * (segment // keys + FIXED) + max(counts) * FOLD // 100
    pays = len(listed) * heads <= programs and split < -(-max(seen) // keys)
    can = len(rows) <= len(units) and max(counts) > 1 and len(listed) <= max_tiles
    chosen = can and (mode == SPLIT or (mode == AUTO and pays))
    assert (count.tolist(), num_units.tolist()) == ([len(listed)], [len(rows) if chosen else 0])
    found = [tuple(row) for row in units.tolist()]
    assert found[: len(rows) if chosen else 0] == ([row for *_, row in sorted(rows)] if chosen else [])
