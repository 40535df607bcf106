"""A few seeded lives; `python -m tests.simulation --seeds N` runs more."""

from __future__ import annotations

import pytest

from tests.simulation.simulator import simulate


@pytest.mark.parametrize("seed", range(10))
def test_a_seeded_life(seed: int) -> None:
    assert simulate(seed).done > 10


def test_lives_reuse_what_they_computed() -> None:
    """Not vacuous: over some seeds both tiers must have served tokens."""
    outcomes = [simulate(seed, 80) for seed in range(20, 28)]
    assert sum(o.cached_tokens for o in outcomes) > 1_000
    assert sum(o.fetched_tokens for o in outcomes) > 0


def test_who_is_cut_off_from_the_store_stops_alone_and_comes_back() -> None:
    """Not vacuous: engines are cut off, alone and all at once; the others go on fetching, and so do they afterwards."""
    outcomes = [simulate(seed, cuts_off=True) for seed in range(40, 46)]
    assert sum(o.num_pauses for o in outcomes) > 10
    assert sum(o.num_store_pauses for o in outcomes) > 0
    assert sum(o.tokens_beside for o in outcomes) > 0
    assert sum(o.num_recoveries for o in outcomes) > 0


def test_a_seed_is_a_life() -> None:
    assert simulate(7, 60) == simulate(7, 60)
