"""What every scan of recurrent states must hold, whatever its recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kernels.backend import Backend
from kernels.state_slots import StateSlots
from tests.kernels.compare import assert_same_bits
from tests.kernels.recurrences import Step, assert_states, expected
from tests.kernels.state_inputs import POISON, SCANNED, Begin, StateRow, begins, make_pool, make_slots, sources
from tests.kernels.target import Target

CPU = Target("cpu", Backend.AUTO)


class Sizes(Protocol):
    """Heads and their sizes; `state` is what a slot holds."""

    @property
    def state(self) -> tuple[int, int, int]: ...


class Scanned(Protocol):
    """Returns the outputs and the pool after a launch, on the CPU; the given pool stays as it is."""

    def __call__(
        self,
        given: Any,
        first: list[int],
        rows: list[StateRow],
        pool: torch.Tensor,
        slots: StateSlots,
        target: Target,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Scan(NamedTuple):
    """An op that scans. `layer` makes its inputs for some tokens, with `part` and `beside`; `step` is its truth."""

    layer: Callable[[int, Any, torch.dtype, int], Any]
    scanned: Scanned
    step: Callable[[Any, Any], Step]


def on_cpu_too(target: Target) -> list[Target]:
    """Beside the reference what a CPU takes by itself."""
    return [target, CPU] if target.backend is Backend.REFERENCE else [target]


def check_rows_of_every_kind(
    scan: Scan, target: Target, sizes: Sizes, shape: Sequence[int], dtype: torch.dtype, tolerance: float
) -> None:
    """In one launch; slots that no row begins from are NaN, and none of those that no row names changes.

    `shape`: of a token's output; `tolerance`: of the largest output or state.
    """
    first, rows = [position for position, _ in SCANNED], [row for _, row in SCANNED]
    slots, count = make_slots(rows)
    pool, cu = make_pool(slots, rows, count, sizes.state, torch.float32), begins(rows)
    given = scan.layer(int(cu[-1]), sizes, dtype, 2)
    wanted, wanted_pool = expected(scan.step(given, sizes), slots, rows, cu, pool, shape)
    for each in on_cpu_too(target):
        out, after = scan.scanned(given, first, rows, pool, slots, each)
        assert out.dtype is dtype
        assert_states(out, wanted, tolerance)
        assert_states(after, wanted_pool, tolerance)


def check_cuts_on_the_grid(scan: Scan, target: Target, sizes: Sizes, dtype: torch.dtype, is_restored: bool) -> None:
    """A row of 200 tokens, cut at 64 and 128, beside others; its states in working slots or through snapshots.

    The reference goes token by token: no cut changes it. What a CPU takes goes block by block.
    """
    rows = [StateRow(200, leave=(64, 128, 200))]
    given, (slots, count) = scan.layer(200, sizes, dtype, 2), make_slots(rows)
    for each in on_cpu_too(target):
        empty = torch.full((count, *sizes.state), POISON)
        whole, ended = scan.scanned(given, [0], rows, empty, slots, each)
        plain, _ = scan.scanned(given, [0], [StateRow(200)], empty, make_slots([StateRow(200)], padding=0)[0], each)
        assert_same_bits(plain, whole)
        state = None
        for entry, (at, end) in enumerate(((0, 64), (64, 128), (128, 200))):
            begin = Begin.FRESH if not at else Begin.RESTORE if is_restored else Begin.WORKING
            mixed = [StateRow(3), StateRow(end - at, begin, leave=(end - at,)), StateRow(70)]
            own, size = make_slots(mixed, seed=at)
            pool = make_pool(own, mixed, size, sizes.state, torch.float32)
            if state is not None:
                pool[sources(own, mixed)[1]] = state
            others = scan.layer(73, sizes, dtype, at)
            beside = others.part(0, 3).beside(given.part(at, end), others.part(3, 73))
            out, after = scan.scanned(beside, [0, at, 0], mixed, pool, own, each)
            assert_same_bits(out[3 : 3 + end - at], whole[at:end])
            state = after[own.leave_slot[0]]
            assert_same_bits(after[own.working[1]], state)
            assert_same_bits(state, ended[slots.leave_slot[entry]])


def check_cuts_off_the_grid(scan: Scan, target: Target, sizes: Sizes, *, is_relative: bool) -> None:
    """They agree to within 1e-5, of the largest output if `is_relative`."""
    none, count = make_slots([StateRow(150)])
    given = scan.layer(150, sizes, torch.float32, 2)
    for each in on_cpu_too(target):
        pool = torch.full((count, *sizes.state), POISON)
        whole, ended = scan.scanned(given, [0], [StateRow(150)], pool, none, each)
        parts, pool = [], torch.full((count, *sizes.state), POISON)
        for first, end in ((0, 1), (1, 63), (63, 65), (65, 100), (100, 150)):
            rows = [StateRow(end - first, Begin.WORKING if first else Begin.FRESH)]
            fresh = torch.tensor([int(not first)], dtype=torch.int32)
            slots = none._replace(fresh=fresh, restore=torch.zeros_like(fresh))
            out, pool = scan.scanned(given.part(first, end), [first], rows, pool, slots, each)
            parts.append(out)
        working, atol = none.working[0], 1e-5 * (whole.abs().max().item() if is_relative else 1.0)
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0.0, atol=atol)
        torch.testing.assert_close(pool[working], ended[working], rtol=0.0, atol=atol)


def check_company_with_two_threads(scan: Scan, sizes: Sizes) -> None:
    """What a CPU takes by itself gives a row the same bits alone and beside another one."""
    rows = [StateRow(200), StateRow(130)]
    given, (slots, count) = scan.layer(330, sizes, torch.float32, 2), make_slots(rows)
    pool = torch.full((count, *sizes.state), POISON)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together, _ = scan.scanned(given, [0, 0], rows, pool, slots, CPU)
        alone, _ = scan.scanned(given.part(200, 330), [0], [StateRow(130)], pool, make_slots([StateRow(130)])[0], CPU)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(alone, together[200:])
