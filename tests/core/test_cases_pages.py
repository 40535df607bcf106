"""The pages of one FULL group: hits, room, order and growth; ids as in docs/cases.md. Page 4 unless noted."""

from __future__ import annotations

import pytest

from session.messages import Extend, Refusal
from session.words import RefusalReason, SequenceId
from tests.core.driver import FakeWorker
from tests.core.oracle import Oracle
from tests.core.world import Live, World, full


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def make(num_pages: int, page_tokens: int = 4) -> FakeWorker:
    return FakeWorker(World(watch=True), [full(num_pages)], page_tokens)


def spare(worker: FakeWorker, group: int = 0) -> int:
    """Pages that a newcomer could have: free and evictable."""
    (stats,) = worker.world.manager.stats().workers
    return stats.groups[group].num_free + stats.groups[group].num_evictable


def test_case_1_second_prompt_hits_the_shared_page() -> None:
    worker = make(8)
    worker.run(span(1, 8))
    live = worker.start([1, 2, 3, 4, 9, 10, 11, 12])
    assert live.grant.cached_tokens == live.grant.usable_tokens == 4


def test_case_2_no_room_while_another_holds_the_pool() -> None:
    worker = make(2)
    worker.prefill(worker.start(span(1, 8)))
    assert worker.refused([1, 2, 3, 4, 9, 10, 11, 12]).reason == RefusalReason.NO_ROOM


def test_case_2_vacant_pages_go_first_and_the_hit_is_really_allocated() -> None:
    worker = make(4)
    worker.run(span(1, 8))
    filler = worker.start([50, 51, 52, 53, 60, 61, 62, 63])
    worker.prefill(filler)
    live = worker.start([1, 2, 3, 4, 9, 10, 11, 12])
    assert live.grant.cached_tokens == 4
    worker.prefill(live)
    assert len(set(live.table()) | set(filler.table())) == 4


def test_case_2_a_hit_is_not_room_for_itself() -> None:
    worker = make(3)
    worker.run(span(1, 8))
    worker.prefill(worker.start([50, 51, 52, 53, 60, 61, 62, 63]))
    assert worker.world.tokens_cached(span(1, 8)) == 4
    assert worker.refused([1, 2, 3, 4, 9, 10, 11, 12]).reason == RefusalReason.NO_ROOM
    assert worker.world.tokens_cached(span(1, 8)) == 4


def test_case_3_the_index_never_outgrows_the_pool() -> None:
    worker = make(4)
    oracle = Oracle(worker)
    for i in range(20):
        worker.run(span(100 * i, 100 * i + 3))
        assert len(oracle.resident[0]) <= 4
        oracle.check()
    assert len(oracle.resident[0]) == 4


def test_case_4_at_least_one_token_is_computed() -> None:
    worker = make(8)
    worker.run(span(1, 8))
    assert worker.start(span(1, 8)).grant.cached_tokens == 4
    assert worker.start(span(1, 4)).grant.cached_tokens == 0
    assert worker.start([1]).grant.cached_tokens == 0


def test_case_4_r5b_unreported_pages_are_not_found() -> None:
    worker = make(8)
    live = worker.start(span(1, 8))
    assert worker.world.tokens_cached(span(1, 9)) == 0
    worker.launch(live)
    assert worker.world.tokens_cached(span(1, 9)) == 0
    assert worker.start(span(1, 8)).grant.cached_tokens == 0
    worker.publish(live)
    assert worker.world.tokens_cached(span(1, 9)) == 8


def test_case_6_generated_tokens_hit_in_the_next_turn() -> None:
    worker = make(16)
    live = worker.start(span(1, 8))
    worker.prefill(live)
    worker.sample(live, [9])
    worker.decode(live, span(10, 19))
    worker.sample(live, [20])
    worker.publish(live)
    worker.release(live)
    follow = worker.start(span(1, 20))
    assert follow.grant.cached_tokens == 16


def test_case_6_only_computed_pages_of_the_accepted_are_published() -> None:
    worker = make(16)
    live = worker.start(span(1, 20))
    worker.launch(live, 12)
    worker.publish(live)
    assert worker.world.tokens_cached(span(1, 21)) == 12


def test_case_7_the_last_sampled_token_has_no_kv_yet() -> None:
    worker = make(16)
    live = worker.start(span(1, 8))
    worker.prefill(live)
    worker.decode(live, span(9, 19))
    worker.sample(live, [20])
    worker.publish(live)
    assert worker.world.tokens_cached(span(1, 24)) == 16
    assert worker.extend(live, 20)
    worker.launch(live)
    worker.publish(live)
    assert worker.world.tokens_cached(span(1, 24)) == 20


def test_case_8_the_watermark_is_whole_pages() -> None:
    worker = make(16)
    live = worker.start(span(1, 10))
    worker.prefill(live)
    assert worker.world.tokens_cached(span(1, 20)) == 8
    worker.decode(live, span(11, 16))
    assert worker.world.tokens_cached(span(1, 20)) == 16


@pytest.mark.parametrize(("length", "registered"), [(12, 8), (10, 8), (13, 12)])
def test_case_10_the_same_prompt_recomputes_its_last_page(length: int, registered: int) -> None:
    worker = make(16)
    worker.run(span(1, length))
    assert worker.world.tokens_cached(span(1, length)) == registered
    assert worker.world.tokens_cached(span(1, length + 4)) == length // 4 * 4


@pytest.mark.parametrize(("pool", "granted"), [(6, True), (4, False)])
def test_case_11_r13_room_for_several_tokens_at_once(pool: int, granted: bool) -> None:
    worker = make(pool)
    live = worker.start(span(1, 14))
    worker.prefill(live)
    if pool == 6:
        worker.decode(live, span(15, 19))
        assert len(live.table()) == 5
        assert worker.extend(live, 24)
        assert len(live.table()) == 6
    else:
        worker.decode(live, [15, 16])
        before = worker.world.snapshot()
        assert not worker.extend(live, 24)
        assert worker.world.snapshot() == before
        assert len(live.table()) == 4
    assert granted == (pool == 6)


def test_case_11_r14_r16_growth_is_unconditional() -> None:
    single = make(8, page_tokens=1)
    live = single.start([1, 2])
    single.prefill(live)
    single.decode(live, [3])
    assert len(live.table()) == 3
    worker = make(8)
    live = worker.start(span(1, 4))
    worker.prefill(live)
    assert worker.extend(live, 8)
    assert len(live.table()) == 2
    short = worker.start([7, 7, 7])
    assert worker.extend(short, 6)
    assert len(short.table()) == 2


def test_case_13_r6_order_is_that_of_the_last_release() -> None:
    worker = make(4)
    for first in (10, 20, 30, 40):
        worker.run(span(first, first + 3))
    claimed = worker.start([*span(10, 13), 99])
    assert claimed.grant.cached_tokens == 4
    worker.release(claimed)
    found = [worker.world.tokens_cached(span(first, first + 4)) for first in (10, 20, 30, 40)]
    assert found == [4, 0, 4, 4], "the new page took the oldest; the claimed page went to the back"
    worker.run([77] * 8)
    found = [worker.world.tokens_cached(span(first, first + 4)) for first in (10, 20, 30, 40)]
    assert found == [4, 0, 0, 4]


def test_case_13_r8_vacant_before_cached() -> None:
    worker = make(4)
    worker.run(span(10, 17))
    live = worker.start(span(20, 27))
    assert worker.world.tokens_cached(span(10, 18)) == 8
    worker.release(live)
    worker.run(span(30, 37))
    assert worker.world.tokens_cached(span(10, 18)) == 8, "released without content: vacant again"


def test_r7_tail_pages_go_before_head_pages() -> None:
    worker = make(4)
    worker.run(span(1, 16))
    worker.run([90, 91, 92, 93])
    assert worker.world.tokens_cached(span(1, 17)) == 12


def test_case_14_releasing_one_sharer_leaves_the_other() -> None:
    worker = make(6)
    first = worker.start(span(1, 8))
    worker.prefill(first)
    second = worker.start([*span(1, 8), 9])
    assert second.table()[:2] == first.table()
    worker.release(first)
    worker.prefill(second)
    before = worker.world.snapshot()
    refusal = worker.submit(span(50, 80))
    assert isinstance(refusal, Refusal)
    assert worker.world.snapshot() == before
    worker.release(second)
    assert spare(worker) == 6


def test_r9_demand_counts_hits_that_lie_on_the_free_side() -> None:
    """n pages, u of the hits in use by others: what is needed is n - u, whether or not the hit is cached."""
    worker = make(6)
    worker.run(span(1, 16))
    holder = worker.start([*span(1, 8), 99])
    assert spare(worker) == 3
    worker.prefill(holder)
    assert worker.refused([*span(1, 16), *span(21, 28)]).reason == RefusalReason.NO_ROOM
    live = worker.start([*span(1, 16), 21])
    assert live.grant.cached_tokens == 16


def test_r10_a_claimed_hit_is_never_reset() -> None:
    worker = make(4)
    oracle = Oracle(worker)
    worker.run(span(1, 8))
    worker.world.events.clear()
    live = worker.start([*span(1, 8), 9])
    assert worker.world.events == []
    oracle.check()
    worker.prefill(live)


def test_an_extend_for_room_that_is_held_gives_nothing() -> None:
    worker = make(4)
    live = worker.start(span(1, 9))
    reply = worker.step(extends=[Extend(SequenceId(live.id), 10)])
    assert not reply.refusals
    assert not [p for e in reply.extends for p in e.pages if p.page_ids]


def test_reserve_stays_free_or_evictable() -> None:
    worker = make(6)
    assert isinstance(worker.submit(span(1, 16), reserve=3), Refusal)
    live = worker.submit(span(1, 16), reserve=2)
    assert isinstance(live, Live)
    assert spare(worker) == 2
