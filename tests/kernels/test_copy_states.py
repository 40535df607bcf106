"""copy_states: the named slots of all layers and nothing else, for states of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.copy_states import check_copies, copy_states
from kernels.errors import KernelArgumentError
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target


def random_bytes(*size: int) -> torch.Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def indices(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [7, 40, 8192, 10_002, 3 * 8192 + 8])
@pytest.mark.parametrize("layers", [1, 3])
def test_pairs_and_padding(target: Target, layers: int, size: int, dtype: torch.dtype) -> None:
    """A source may be read twice; a pair of which either is no slot is skipped."""
    pool = random_bytes(layers, 9, size)
    sources, destinations = indices(3, 0, 3, -1, 8, 5, dtype=dtype), indices(1, 2, 6, 7, 4, 0, dtype=dtype)
    wanted = pool.clone()
    wanted[:, [1, 6, 4]] = pool[:, [3, 3, 8]]
    got = pool.to(target.device)
    copy_states(got, sources.to(target.device), destinations.to(target.device), slot_axis=1, backend=target.backend)
    assert_same_bits(got.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_states_of_any_shape(target: Target, dtype: torch.dtype) -> None:
    """NaN are bytes as others are."""
    pool = torch.randn(5, 4, 3, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    pool[2, 1] = float("nan")
    wanted = pool.clone()
    wanted[4] = pool[2]
    got = pool.to(target.device)
    copy_states(got, indices(2).to(target.device), indices(4).to(target.device), backend=target.backend)
    assert_same_bits(got.cpu(), wanted)


def test_nothing_to_copy(target: Target) -> None:
    pool = random_bytes(3, 40).to(target.device)
    before, none = pool.clone(), indices().to(target.device)
    copy_states(pool, none, none, backend=target.backend)
    assert_same_bits(pool, before)


def test_a_pool_beyond_two_billion_elements(target: Target) -> None:
    far = 2**31 // 65 + 1
    pool = torch.empty(far + 1, 65, dtype=torch.uint8, device=target.device)
    pool[1] = random_bytes(65).to(target.device)
    copy_states(pool, indices(1).to(target.device), indices(far).to(target.device), backend=target.backend)
    assert_same_bits(pool[far], pool[1])


WRONG = [
    (random_bytes(4, 8)[:, ::2], indices(1), indices(2), 0, "pool: must be contiguous"),
    (random_bytes(4, 8), indices(1), indices(2), 1, r"slot_axis: pool of shape \[4, 8\] cannot be counted by axis 1"),
    (random_bytes(4, 8), indices(1, 2), indices(3), 0, r"destinations: shape must be \[2\], got \[1\]"),
    (random_bytes(4, 8), indices(1).float(), indices(2), 0, "sources: dtype must be one of"),
    (random_bytes(4, 8), indices(1), indices(4), 0, "destinations: must be below 4, got 4"),
    (random_bytes(4, 8), indices(5), indices(0), 0, "sources: must be below 4, got 5"),
    (random_bytes(4, 8), indices(1, 3), indices(2, 2), 0, "destinations: slot 2 is named twice"),
    (random_bytes(4, 8), indices(1, 2), indices(2, 3), 0, "destinations: slot 2 is named twice"),
]


@pytest.mark.parametrize(("pool", "sources", "destinations", "axis", "message"), WRONG)
def test_wrong_arguments_are_named(
    pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor, axis: int, message: str
) -> None:
    before = pool.clone()
    with pytest.raises(KernelArgumentError, match=message):
        copy_states(pool, sources, destinations, slot_axis=axis)
    assert_same_bits(pool, before)


@pytest.mark.skipif(INTERPRETING, reason="arithmetic only")
@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=5))
def test_what_is_let_through_has_one_outcome_in_any_order(pairs: list[tuple[int, int]]) -> None:
    """And what is refused is named: a slot written twice, or read by one pair and written by another."""
    sources, destinations = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    real = [pair for pair in pairs if min(pair) > 0]
    written = [destination for _, destination in real]
    is_ordered = len(set(written)) < len(written) or set(written) & {source for source, _ in real}
    if is_ordered:
        with pytest.raises(KernelArgumentError, match="is named twice"):
            check_copies(sources, destinations, 7)
        return
    check_copies(sources, destinations, 7)
    outcomes = []
    for order in (real, real[::-1]):
        slots = list(range(7))
        for source, destination in order:
            slots[destination] = slots[source]
        outcomes.append(slots)
    assert outcomes[0] == outcomes[1]
