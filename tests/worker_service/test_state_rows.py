"""Which state slots a launch reads and writes, row by row."""

from __future__ import annotations

from array import array
from typing import Any, cast

from session.words import GroupKind, GroupSpec, PageId, StateSlot
from tests.worker_service.model_kit import PagedTokens
from worker_service.core.batch import build_batch
from worker_service.core.batch_part import part_of
from worker_service.core.launch_plan import Row
from worker_service.core.sequence import Sequence
from worker_service.core.state_rows import StateRows

PAGE = 4
FULL = GroupSpec("full", GroupKind.FULL, num_pages=40, page_bytes=64)
STATE = GroupSpec("state", GroupKind.STATE, num_pages=40, page_bytes=64)
GROUPS = (STATE, FULL, STATE)


class Stateful(PagedTokens):
    """A sequence with a slot for its state in each STATE group."""

    def __init__(self, length: int, slot: int, start_len: int = 0) -> None:
        pages = array("i", range(1, -(-length // PAGE) + 1))
        super().__init__(array("i", range(length)), [array("i"), pages, array("i")])
        self.prompt_len = length
        self.start_len = start_len
        self.working = snapshots(0, slot, slot + 20)
        self.restore = snapshots(start_len, slot + 1, slot + 21) if start_len else ()
        self.rolling = snapshots(0, slot + 2, slot + 22)
        self.snapshots: tuple[StateSlot, ...] = ()


def snapshots(boundary_tokens: int, first: int, second: int) -> tuple[StateSlot, ...]:
    return StateSlot(0, boundary_tokens, PageId(first)), StateSlot(2, boundary_tokens, PageId(second))


def rows_of(*parts: tuple[Stateful, int, int]) -> list[Row]:
    return [Row(cast(Sequence, sequence), first, end - first) for sequence, first, end in parts]


def states_of(batch: Any) -> tuple[StateRows, StateRows]:
    first, paged, second = batch.states
    assert paged is None
    return first, second


def test_a_chunk_begins_at_zero_or_from_its_snapshot_and_leaves_what_it_passes() -> None:
    fresh, resumed, going_on = Stateful(11, 1), Stateful(19, 4, start_len=8), Stateful(19, 7, start_len=4)
    resumed.snapshots = (*snapshots(8, 9, 29), *snapshots(12, 10, 30), *snapshots(16, 11, 31))
    batch = build_batch(rows_of((fresh, 0, 11), (resumed, 8, 15), (going_on, 8, 19)), 0, GROUPS, PAGE)
    first, second = states_of(batch)
    assert first == StateRows(
        working=array("i", [1, 4, 7]),
        restore=array("i", [0, 5, 0]),
        fresh=array("i", [1, 0, 0]),
        rolling=array("i", [0, 0, 0]),
        leave_row=array("i", [1]),
        leave_tokens=array("i", [4]),
        leave_slot=array("i", [10]),
    )
    assert (second.working.tolist(), second.restore.tolist(), second.leave_slot.tolist()) == (
        [21, 24, 27],
        [0, 25, 0],
        [30],
    )


def test_a_decoded_token_that_ends_a_page_leaves_the_rolling_snapshot() -> None:
    ends, inside, chunk = Stateful(8, 1), Stateful(7, 4), Stateful(8, 7)
    batch = build_batch(rows_of((ends, 7, 8), (inside, 6, 7), (chunk, 4, 8)), 2, GROUPS, PAGE)
    first, second = states_of(batch)
    assert first.rolling.tolist() == [3, 0, 0]
    assert second.rolling.tolist() == [23, 0, 0]


def test_a_part_of_a_batch_has_its_rows_states() -> None:
    one, other = Stateful(8, 1), Stateful(12, 4)
    other.snapshots = snapshots(8, 9, 29)
    first, _ = states_of(part_of(build_batch(rows_of((one, 0, 8), (other, 0, 12)), 0, GROUPS, PAGE), 1, 2))
    assert (first.working.tolist(), first.fresh.tolist()) == ([4], [1])
    assert (first.leave_row.tolist(), first.leave_tokens.tolist(), first.leave_slot.tolist()) == ([0], [8], [9])


def test_a_model_without_states_has_none() -> None:
    sequence = Stateful(4, 1)
    sequence.tables = sequence.tables[1:2]
    assert build_batch(rows_of((sequence, 0, 4)), 0, (FULL,), PAGE).states == ()
