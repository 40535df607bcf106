"""top_k: positions in ascending order, ties to the lowest, all of them where there are no more than k (R25)."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.top_k import MAX_COLUMNS, top_k
from kernels.top_k.hopper import reason_against_case
from tests.kernels.compare import assert_same_bits
from tests.kernels.target import Target

NAN, INF = float("nan"), float("inf")


def by_hand(row: list[float], k: int) -> list[int]:
    """One row's choice, by a sort of Python numbers."""
    ranked = [-INF if value != value else value for value in row]
    best = sorted(range(len(row)), key=lambda at: (-ranked[at], at))[:k]
    return sorted(best) + [-1] * (k - len(best))


def check(logits: torch.Tensor, counts: list[int], k: int, target: Target) -> torch.Tensor:
    """Columns behind a row's keys are poisoned, and chosen by nobody."""
    given = logits.clone()
    for row, count in enumerate(counts):
        given[row, count:] = NAN
    lengths = torch.tensor(counts, dtype=torch.int32, device=target.device)
    got = top_k(given.to(target.device), lengths, k, backend=target.backend)
    for row, count in enumerate(counts):
        assert got[row].tolist() == by_hand(logits[row, :count].tolist(), k), f"row {row}"
    return got


def drawn(rows: int, width: int, step: float = 0.0, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3
    return (values / step).round() * step if step else values


@pytest.mark.parametrize("k", [1, 7, 64])
@pytest.mark.parametrize("step", [0.0, 0.5, 4.0])
def test_rows_of_every_length(target: Target, k: int, step: float) -> None:
    """A step makes ties: with 4 nearly all are equal."""
    check(drawn(7, 300, step), [0, 1, k - 1, k, k + 1, 299, 300], k, target)


def test_rows_of_many_tiles_with_ties_across_them(target: Target) -> None:
    check(drawn(3, 9000, 1.0), [9000, 4097, 8192], 2048, target)


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_rows_that_are_narrowed_more_than_once(target: Target, step: float) -> None:
    """Of 70,000 keys nine programs keep 2,048 each, of these three, and one of these."""
    check(drawn(2, 70_000, step), [70_000, 24_577], 2048, target)


def test_all_equal_takes_the_first(target: Target) -> None:
    got = check(torch.zeros(2, 5000), [5000, 4500], 100, target)
    assert got[0].tolist() == list(range(100))


def test_zeros_of_both_signs_nan_and_infinities(target: Target) -> None:
    row = [-0.0, 0.0, NAN, INF, -INF, -0.0, 1e-45, -1e-45, NAN, -INF, 3.4e38, -3.4e38]
    logits = torch.tensor([row, row[::-1]])
    for k in range(1, 13):
        check(logits, [12, 12], k, target)


def test_a_row_does_not_depend_on_its_mates(target: Target) -> None:
    logits = drawn(5, 700)
    together = check(logits, [700, 650, 40, 3, 512], 33, target)
    for row, count in enumerate([700, 650, 40, 3, 512]):
        assert_same_bits(check(logits[row : row + 1], [count], 33, target)[0], together[row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 9, dtype=torch.bfloat16)}, "logits: dtype"),
        ({"logits": torch.zeros(9)}, "logits: shape"),
        ({"logits": torch.zeros(1, 1).expand(2, MAX_COLUMNS + 1)}, "logits: "),
        ({"num_keys": torch.zeros(3, dtype=torch.int32)}, "num_keys: shape"),
        ({"k": 0}, "k: must be at least 1"),
        ({"out": torch.zeros(2, 3)}, "out: dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "logits": torch.zeros(2, 9),
        "num_keys": torch.zeros(2, dtype=torch.int32),
        "k": 3,
    }
    with pytest.raises(KernelArgumentError, match=message):
        top_k(**{**arguments, **change})


@pytest.mark.parametrize(
    ("width", "k", "reason"), [(65_536, 2048, None), (4097, 1, None), (4096, 2048, "soon"), (65_536, 4097, "at most")]
)
def test_which_rows_the_gluon_kernels_take(width: int, k: int, reason: str | None) -> None:
    got = reason_against_case(torch.zeros(1, 1).expand(3, width), k)
    assert got is None if reason is None else reason in str(got)
