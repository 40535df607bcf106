"""FULL beside WINDOW groups: rows and room; ids as in docs/cases.md. Page 2 unless noted.

Room is counted per group: free and evictable pages together.
"""

from __future__ import annotations

from array import array

import pytest

from session.messages import Refusal
from session.words import GroupPages, GroupSpec, RefusalReason
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.test_cases_pages import span, spare
from tests.core.world import Live, World, full, window


def make(page_tokens: int, *groups: object) -> FakeWorker:
    return FakeWorker(World(watch=True), groups, page_tokens)  # type: ignore[arg-type]


def both(worker: FakeWorker) -> tuple[int, int]:
    return spare(worker, 0), spare(worker, 1)


@pytest.mark.parametrize(
    ("tokens", "prefix", "rows", "taken"),
    [([*span(1, 8), *span(901, 904)], 8, 7, 7), (span(1, 8), 6, 5, 5), ([*span(1, 4), *span(801, 808)], 4, 7, 7)],
)
def test_case_28_rows_and_room_per_group(tokens: list[int], prefix: int, rows: int, taken: int) -> None:
    worker = make(2, full(64), window(64, 32))
    oracle = Oracle(worker)
    first = worker.start(span(1, 8))
    worker.prefill(first)
    first_tables = [first.table(0), first.table(1)]
    worker.release(first)
    before = both(worker)
    live = worker.start(tokens)
    assert worker.extend(live, len(tokens) + 1)
    assert live.grant.usable_tokens == prefix
    for group in (0, 1):
        assert len(live.table(group)) == rows
        assert live.table(group)[: prefix // 2] == first_tables[group][: prefix // 2]
    assert tuple(a - b for a, b in zip(before, both(worker), strict=True)) == (taken, taken)
    oracle.check()
    worker.prefill(live)
    worker.release(live)
    oracle.check()
    assert both(worker) == (64, 64)


def test_case_28_what_finishes_at_once_is_still_published() -> None:
    worker = make(2, full(64), window(64, 32))
    worker.run(span(1, 8))
    live = worker.start(span(1, 8))
    worker.launch(live)
    worker.publish(live)
    worker.release(live)
    assert worker.start(span(1, 8)).grant.usable_tokens == 6


def test_case_29_multi_turn_rows() -> None:
    worker = make(2, full(64), window(64, 32))
    first = worker.start(span(1, 4))
    worker.prefill(first)
    worker.decode(first, span(5, 8))
    worker.sample(first, [9])
    worker.publish(first)
    worker.release(first)
    second = worker.start([*span(1, 8), 901, 902])
    assert second.grant.usable_tokens == 8
    worker.prefill(second)
    worker.decode(second, [201, 202])
    worker.sample(second, [203])
    worker.publish(second)
    worker.release(second)
    before = both(worker)
    third = worker.start([*span(1, 8), 901, 902, 201, 202, 203, 951, 952, 953])
    assert third.grant.usable_tokens == 12
    assert third.tokens[12:] == [203, 951, 952, 953]
    assert worker.extend(third, 17)
    assert [len(third.table(0)), len(third.table(1))] == [9, 9]
    assert tuple(a - b for a, b in zip(before, both(worker), strict=True)) == (9, 9)


def test_case_30_the_window_row_has_holes_and_shares_its_tail() -> None:
    worker = make(2, full(64), window(64, 4))
    oracle = Oracle(worker)
    first = worker.start(span(1, 8))
    worker.prefill(first)
    pages = first.table(1)
    full_pages = first.table(0)
    worker.release(first)
    before = both(worker)
    second = worker.start([*span(1, 8), 21, 22])
    assert worker.extend(second, 11)
    assert second.grant.usable_tokens == 8
    row = second.table(1)
    assert row[:4] == [0, 0, pages[2], pages[3]]
    assert len(row) == 6 and all(row[4:])
    assert second.table(0)[:4] == full_pages
    assert tuple(a - b for a, b in zip(before, both(worker), strict=True)) == (6, 4)
    oracle.check()


def test_case_30_a_page_behind_the_window_stays_hittable() -> None:
    worker = make(2, full(64), window(64, 4))
    live = worker.start(span(1, 12))
    worker.prefill(live, 2)
    assert worker.world.tokens_cached([*span(1, 4), 50, 51]) == 4
    short = worker.start([*span(1, 4), 50, 51])
    worker.prefill(short)
    worker.prefill(worker.start([*span(1, 8), 60]))


def test_case_31_protected_hits_are_not_room() -> None:
    worker = make(2, full(5), window(5, 32))
    worker.run(span(1, 4))
    third = worker.start([71, 72])
    assert worker.extend(third, 3)
    assert both(worker) == (3, 3)
    before = worker.world.snapshot()
    second = worker.submit([*span(1, 4), *span(81, 84)])
    assert isinstance(second, Refusal) and second.reason == RefusalReason.NO_ROOM
    assert worker.world.snapshot() == before
    worker.prefill(third)
    worker.release(third)
    live = worker.start([*span(1, 4), *span(81, 84)])
    assert live.grant.usable_tokens == 4
    assert worker.extend(live, 9)
    assert both(worker) == (0, 0)


def test_case_43_a_window_pool_too_full_for_the_next_chunk_refuses() -> None:
    """Ten pages of 4, window 16: after 32 tokens four pages are read and six are to be had; eight are not."""
    worker = make(4, full(64), window(10, 16))
    live = worker.start(span(1, 64), chunk=32)
    worker.launch(live, 32)
    worker.publish(live)
    assert spare(worker, 1) == 6
    before = worker.world.snapshot()
    assert not worker.extend(live, 64)
    assert worker.world.snapshot() == before
    assert worker.extend(live, 32 + 24)
    worker.launch(live, 24)


def test_a_window_takes_pages_for_the_first_chunk_only() -> None:
    worker = make(4, full(64), window(8, 8))
    live = worker.start(span(1, 64), chunk=8)
    assert len(live.table(0)) == 16
    assert spare(worker, 1) == 6
    worker.prefill(live, 8)
    assert worker.world.tokens_cached([*span(1, 64), 0]) == 64
    assert len(Oracle(worker).resident) == 2


def test_windows_left_behind_go_before_those_at_an_end() -> None:
    """First what a running window left, last what a prompt's end needs to be resumed."""
    worker = make(2, full(64), window(8, 4))
    live = worker.start(span(1, 12), chunk=4)
    worker.prefill(live, 4)
    worker.release(live)
    assert worker.world.tokens_cached([*span(1, 12), 0]) == 12
    worker.run(span(50, 55))
    assert worker.world.tokens_cached([*span(1, 12), 0]) == 12


def test_case_38_a_window_of_one_needs_no_page() -> None:
    worker = make(4, full(16), window(2, 1))
    live = worker.start(span(1, 16), chunk=4)
    worker.prefill(live, 4)
    worker.release(live)
    assert worker.world.tokens_cached([*span(1, 16), 0]) == 16


@pytest.mark.parametrize(("window_tokens", "kept"), [(4, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_case_38_pages_that_a_window_reads(window_tokens: int, kept: int) -> None:
    """w - 1 tokens before the boundary: a window of 10 over pages of 4 needs a run of 3."""
    worker = make(4, full(64), window(64, window_tokens))
    worker.run(span(1, 32))
    before = both(worker)
    live = worker.start([*span(1, 32), 33])
    assert before[1] - both(worker)[1] == kept + 1
    assert [p for p in live.table(1)[:8] if p] == live.table(1)[8 - kept : 8]


def test_a_hole_in_the_tree_takes_the_sequences_page() -> None:
    """A window page was evicted, FULL stayed; the next sequence that computes these tokens fills the hole."""
    worker = make(2, full(64), window(4, 4))
    oracle = Oracle(worker)
    worker.run(span(1, 4))
    worker.run(span(50, 57))
    assert worker.world.tokens_cached(span(1, 5)) == 0
    live = worker.start(span(1, 5))
    assert live.grant.usable_tokens == 0
    assert live.grant.match.matched_tokens == 4
    assert live.grant.match.limiting_group == "window"
    worker.launch(live)
    reply = worker.publish(live)
    assert [p.group for r in reply.remaps for p in r.pages] == [0]
    assert worker.world.tokens_cached(span(1, 5)) == 4
    oracle.check()


def test_remap_leaves_no_twin_in_any_group() -> None:
    worker = make(2, full(32), window(32, 4))
    oracle = Oracle(worker)
    one, two = worker.start(span(1, 8)), worker.start(span(1, 8))
    worker.prefill(one)
    worker.launch(two)
    reply = worker.publish(two)
    assert {p.group for r in reply.remaps for p in r.pages} <= {0, 1}
    assert two.table(0) == one.table(0)
    assert two.table(1)[-2:] == one.table(1)[-2:]
    oracle.check()


def test_e19_every_mix_of_groups_hits() -> None:
    from itertools import combinations

    from tests.core.world import state

    kinds = [full(40), window(40, 32, "small"), window(40, 96, "large"), state(12)]
    for count in range(1, 5):
        for mix in combinations(kinds, count):
            worker = FakeWorker(World(watch=True), mix, 16)
            worker.run(span(1, 55))
            live = worker.start([*span(1, 48), *span(70, 74)])
            assert live.grant.usable_tokens == 48, [spec.name for spec in mix]
            worker.prefill(live)


def test_tables_come_as_packed_little_endian_ids() -> None:
    worker = make(2, full(8))
    live = worker.start(span(1, 6))
    (pages,) = live.grant.tables
    assert isinstance(pages, GroupPages)
    assert list(array("I", pages.page_ids)) == live.table(0)
    assert isinstance(live, Live)


def test_m22_hits_of_a_window_are_no_room_either() -> None:
    worker = make(2, full(32), window(5, 8))
    worker.run(span(1, 6))
    filler = worker.start([90])
    assert spare(worker, 1) == 4
    before = worker.world.snapshot()
    assert worker.refused([*span(1, 6), *span(21, 26)], chunk=4).reason == RefusalReason.NO_ROOM
    assert worker.world.snapshot() == before
    worker.prefill(filler)
    worker.release(filler)
    live = worker.start([*span(1, 6), *span(21, 26)], chunk=4)
    assert live.grant.usable_tokens == 6
    worker.prefill(live, 4)


@pytest.mark.parametrize("groups", [(full(3),), (full(9), window(3, 16))], ids=["full", "window"])
def test_r13_an_extend_by_one_page_too_many(groups: tuple[GroupSpec, ...]) -> None:
    worker = make(2, *groups)
    live = worker.start(span(1, 4))
    worker.prefill(live)
    worker.start([90])
    before = worker.world.snapshot()
    assert not worker.extend(live, 5)
    assert worker.world.snapshot() == before
