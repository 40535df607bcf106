"""The work list of a prefill step: every tile once, the long ones first, neighbours together."""

import random

import pytest
import torch

from kernels.prefill_attention.plan import RECORD
from tests.kernels.conftest import INTERPRETING
from tests.kernels.inputs import running_sums

pytest.importorskip("triton")

from kernels.prefill_attention.plan_triton import CLASSES, launch

CASES = [
    [(0, 33), (16, 5), (48, 16), (37, 70), (0, 1), (130, 1), (16, 0)],
    [(0, 1)],
    [(0, 0), (5, 0)],
    [(4096, 512)] * 3,
    [(0, 4000)],
    [(1000 - 7 * i, 1 + i) for i in range(34)],
]
DEVICES = [pytest.param("cpu", id="interpreter")] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]


def tiles(lengths: list[tuple[int, int]], queries: int, keys: int) -> list[tuple[int, ...]]:
    """Records in order, by sorting."""
    found, token = [], 0
    for seq, (cached, new) in enumerate(lengths):
        for first in range(0, new, queries):
            cost = -(-min(cached + first + queries, cached + new) // keys)
            found.append((-cost_class(cost), seq, -first, token, new, cached + new))
        token += new
    return [(seq, -first, *rest) for _, seq, first, *rest in sorted(found)]


def cost_class(cost: int) -> int:
    """The cost with all but its leading bits cleared."""
    cleared = max(cost.bit_length() - CLASSES.bit_length(), 0)
    return cost >> cleared << cleared


def runs(records: list[tuple[int, ...]], queries: int, keys: int) -> list[list[int]]:
    """First place and length of each record's run: its neighbours of one sequence and class."""
    names = [(seq, cost_class(-(-min(kv - new + first + queries, kv) // keys))) for seq, first, _, new, kv in records]
    return [[names.index(name), names.count(name)] for name in names]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [32, 42])
@pytest.mark.parametrize("case", range(len(CASES) + 2))
def test_every_tile_is_listed_once_and_the_long_ones_come_first(case: int, queries: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rng = random.Random(case)
    drawn = [(rng.choice([0, 16, 700]), rng.randint(0, 300)) for _ in range(rng.randint(1, 20))]
    lengths = CASES[case] if case < len(CASES) else drawn
    wanted = tiles(lengths, queries, 128)
    records = torch.full((len(wanted) + 3, RECORD), -1, dtype=torch.int32, device=device)
    count = torch.full((1,), -1, dtype=torch.int32, device=device)
    new, total = [n for _, n in lengths], [c + n for c, n in lengths]
    launch(running_sums(new, device), running_sums(total, device), records, count, queries, 128)
    assert count.tolist() == [len(wanted)]
    listed = records.tolist()[: len(wanted)]
    assert [tuple(row[:5]) for row in listed] == wanted
    assert [row[5:7] for row in listed] == runs(wanted, queries, 128)
    assert bool((records[len(wanted) :] == -1).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_list_that_is_too_short_is_filled_and_not_left(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    records = torch.full((9, RECORD), -1, dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    sums = running_sums([640], device)
    launch(sums, sums, records[:5], count, 64, 128)
    assert count.tolist() == [5] and bool((records[5:] == -1).all())
    assert [row[1] for row in records[:5].tolist()] == [576, 512, 448, 384, 320]
