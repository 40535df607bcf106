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


def test_a_seed_is_a_life() -> None:
    assert simulate(7, 60) == simulate(7, 60)
