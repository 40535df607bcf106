"""Identity of pages, events and statistics. The ids in test names are those of docs/cases.md."""

from __future__ import annotations

import pytest

from cache_service.core.base.page_hash import namespace_digest, page_hash, page_hashes
from cache_service.core.base.types import Cleared, Event, Removed, Residence, Stored
from session.messages import Acquire, Publish, Release
from session.words import MissReason, Namespace, PageHash, SequenceId, WorkerId
from tests.core.at_once import clear_at_once, explain_at_once
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import make, span
from tests.core.world import ABORTED, FINISHED, NS, World, full, pack, state, window


def told(worker: FakeWorker) -> list[Event]:
    events = list(worker.world.events)
    worker.world.events.clear()
    return events


def test_case_44_framing() -> None:
    assert namespace_digest(Namespace("m", "ab", "c")) != namespace_digest(Namespace("m", "a", "bc"))
    assert namespace_digest(Namespace("m", "", "a")) != namespace_digest(Namespace("m", "a", ""))
    assert namespace_digest(Namespace("ma")) != namespace_digest(Namespace("m", "a"))
    digest = namespace_digest(NS)
    prior = bytes(range(32))
    as_tokens = page_hash(digest, b"", prior + pack([1, 2]))
    assert page_hash(digest, prior, pack([1, 2])) != as_tokens


def test_case_44_r1_incremental_equals_one_shot() -> None:
    digest, tokens = namespace_digest(NS), pack(span(1, 12))
    whole = page_hashes(digest, b"", tokens, 8)
    parent, parts = b"", b""
    for start in range(0, len(tokens), 8):
        parent = page_hash(digest, parent, tokens[start : start + 8])
        parts += parent
    assert parts == whole and len(whole) == 6 * 32
    changed = page_hashes(digest, b"", pack([9, *span(2, 12)]), 8)
    assert all(whole[i : i + 32] != changed[i : i + 32] for i in range(0, len(whole), 32))


@pytest.mark.parametrize(
    "other",
    [
        Namespace("model", "", "salt2"),
        Namespace("model"),
        Namespace("model", "salt1", ""),
        Namespace("model2", "", "salt1"),
        Namespace("model", "", "salt"),
        Namespace("models", "", "alt1"),
    ],
)
def test_case_44_e6_e7_m32_namespaces_never_share(other: Namespace) -> None:
    worker = make(16, 16)
    mine = Namespace("model", "", "salt1")
    worker.run(span(1, 59), namespace=mine)
    assert worker.start(span(1, 59), mine).grant.cached_tokens == 48
    live = worker.start(span(1, 59), other)
    assert live.grant.cached_tokens == live.grant.match.matched_tokens == 0
    assert live.grant.match.miss_reason == MissReason.NEVER_SEEN, "not even the reason tells of another tenant"
    worker.prefill(live)
    hashes = [h for e in worker.world.events if isinstance(e, Stored) for h in e.page_hashes]
    assert len(hashes) == len(set(hashes)) == 6


def test_e6_only_the_operator_hears_of_another_salt() -> None:
    worker = make(16, 16)
    worker.run(span(1, 59), namespace=Namespace("model", "", "salt1"))
    other = Namespace("model", "", "salt2")
    (match,) = worker.world.manager.match(other, pack(span(1, 59)), worker.id)
    assert match.match.miss_reason == MissReason.NEVER_SEEN
    (explained,) = explain_at_once(worker.world.manager, other, pack(span(1, 59)), worker.id)
    reasons = {segment.miss_reason for segment in explained.segments} | {explained.match.miss_reason}
    assert MissReason.OTHER_SALT in reasons


@pytest.mark.parametrize("count", [2, 3, 10])
def test_e11_one_stored_event_then_removals_then_one_more(count: int) -> None:
    worker = make(count, 16)
    worker.run(span(1, 16 * count))
    (stored,) = told(worker)
    assert isinstance(stored, Stored)
    assert stored.parent_hash == b"" and len(stored.page_hashes) == count and len(stored.tokens) == 64 * count
    assert (stored.worker_id, stored.group, stored.namespace) == ("w0", 0, NS)
    assert told(worker) == []
    worker.run(span(1001, 1000 + 16 * count))
    events = told(worker)
    removed = [h for e in events if isinstance(e, Removed) for h in e.page_hashes]
    assert sorted(removed) == sorted(stored.page_hashes)
    assert isinstance(events[-1], Stored) and sum(isinstance(e, Stored) for e in events) == 1


def test_e12_a_branch_names_its_parent() -> None:
    worker = make(16, 1)
    worker.run([1, 2, 3, 4])
    worker.run([1, 2, 5, 6])
    first, second = told(worker)
    assert isinstance(first, Stored) and isinstance(second, Stored)
    assert second.parent_hash == first.page_hashes[1] and len(second.page_hashes) == 2
    paged = make(16, 4)
    paged.run([1, 2, 3, 4, 1, 2, 3, 4])
    (stored,) = told(paged)
    assert isinstance(stored, Stored) and len(set(stored.page_hashes)) == 2


def test_e17_watchers_hear_of_prefixes_not_of_their_windows() -> None:
    worker = FakeWorker(World(watch=True), [full(12), window(8, 4)], 1)
    worker.run([1, 2, 3])
    (stored,) = told(worker)
    assert isinstance(stored, Stored) and stored.group == 0
    worker.run(span(40, 47))
    assert [type(e) for e in told(worker)] == [Stored], "the window's pages went, the prefix stays"
    worker.run(span(60, 63), chunk=1)
    removed = [h for e in told(worker) if isinstance(e, Removed) and e.group == 0 for h in e.page_hashes]
    assert sorted(removed) == sorted(stored.page_hashes)


def test_h22_m29_events_follow_the_completed_forward_only() -> None:
    worker = make(16, 4)
    live = worker.start(span(1, 12))
    assert told(worker) == []
    worker.launch(live, 8)
    assert told(worker) == []
    worker.publish(live)
    assert [type(e) for e in told(worker)] == [Stored]
    worker.release(live, ABORTED)
    failed = worker.start(span(101, 108))
    worker.release(failed, ABORTED)
    assert told(worker) == []
    assert worker.world.tokens_cached(span(101, 109)) == 0


def test_e10_m2_clear_drops_everything_and_says_so_once() -> None:
    worker = FakeWorker(World(watch=True), [full(16), window(16, 8), state(8)], 4)
    worker.run(span(1, 13))
    told(worker)
    cleared = clear_at_once(worker.world.manager, None, False)
    worker.world.settle()
    assert cleared.num_pages >= 3
    events = told(worker)
    assert sum(isinstance(e, Cleared) for e in events) == 1
    (stats,) = worker.world.manager.stats().workers
    assert [g.num_free for g in stats.groups] == [16, 16, 8]
    assert stats.num_nodes == 0
    match = worker.start(span(1, 13)).grant.match
    assert (match.usable_tokens, match.miss_reason) == (0, MissReason.CLEARED)


def test_clear_takes_one_namespace_or_only_what_nobody_holds() -> None:
    worker = make(16, 4)
    other = Namespace("model", "", "other")
    worker.run(span(1, 9))
    worker.run(span(1, 9), namespace=other)
    live = worker.start(span(1, 9))
    manager = worker.world.manager
    assert clear_at_once(manager, other, False).num_pages == 2
    worker.world.settle()
    assert worker.world.tokens_cached(span(1, 9)) == 8
    worker.run(span(50, 58))
    assert clear_at_once(manager, None, True).num_pages == 2
    worker.world.settle()
    assert worker.world.tokens_cached(span(1, 9)) == 8
    worker.prefill(live)


def test_e29_reasons_name_the_page_grain() -> None:
    worker = make(32, 16)
    worker.run(span(1, 240))
    live = worker.start(span(1, 240))
    assert live.grant.cached_tokens >= 224
    assert live.grant.match.miss_reason == MissReason.PAGE_TAIL
    coarse = make(2, 784)
    coarse.run([*span(1, 240), 7])
    match = coarse.start([*span(1, 240), 8]).grant.match
    assert match.usable_tokens == 0 and match.miss_reason == MissReason.PAGE_TAIL


def test_reasons_of_misses() -> None:
    worker = make(4, 2)
    worker.run([1, 2, 3, 4])
    seen = worker.world.manager.match(NS, pack([1, 2, 3, 4, 5]), worker.id)[0].match
    assert (seen.usable_tokens, seen.limiting_group) == (4, "")
    assert seen.miss_reason in (MissReason.NONE, MissReason.PAGE_TAIL)
    fresh = worker.world.manager.match(NS, pack([9, 9, 9]), worker.id)[0].match
    assert fresh.miss_reason == MissReason.NEVER_SEEN
    worker.run(span(50, 57))
    gone = worker.world.manager.match(NS, pack([1, 2, 3, 4, 5]), worker.id)[0].match
    assert (gone.usable_tokens, gone.miss_reason) == (0, MissReason.EVICTED)


def test_the_last_word_about_a_page_is_its_reason() -> None:
    """However many times it was evicted, cleared and computed again; Match, Explain and the grant say the same."""
    worker = make(8, 2)
    manager, prompt = worker.world.manager, [1, 2, 3, 4, 5, 6, 7]
    worker.run(prompt)
    for time in range(30):
        if time % 3:
            worker.run(span(100 * time + 50, 100 * time + 65))
        else:
            clear_at_once(manager, None, False)
        worker.world.settle()
        (match,) = manager.match(NS, pack(prompt), worker.id)
        (explained,) = explain_at_once(manager, NS, pack(prompt), worker.id)
        live = worker.start(prompt)
        told = (match.match.miss_reason, explained.match.miss_reason, live.grant.match.miss_reason)
        assert told == (MissReason.EVICTED if time % 3 else MissReason.CLEARED,) * 3
        worker.prefill(live)
        worker.release(live)


def test_explain_accounts_for_every_token() -> None:
    worker = make(8, 2)
    worker.run([1, 2, 3, 4])
    tokens = [1, 2, 3, 4, 9, 9, 9]
    before = worker.world.snapshot()
    (explained,) = explain_at_once(worker.world.manager, NS, pack(tokens), worker.id)
    assert worker.world.snapshot() == before
    at = 0
    for segment in explained.segments:
        assert segment.first_token == at
        at += segment.num_tokens
        assert (segment.residence == Residence.MISSING) == (segment.miss_reason != MissReason.NONE)
    assert at == len(tokens)
    assert explained.segments[0].residence == Residence.DEVICE and explained.segments[0].num_tokens == 4


def test_m18_m19_statistics_count_admitted_requests_once() -> None:
    worker = make(4, 2)
    worker.run([1, 2, 3, 4])
    blocker = worker.start(span(50, 53))
    for _ in range(3):
        worker.refused([1, 2, 3, 4, 5, 6, 7, 8])
    worker.release(blocker, ABORTED)
    worker.run([1, 2, 3, 4, 5, 6, 7, 8])
    (stats,) = worker.world.manager.stats().workers
    assert stats.num_requests == 3
    assert stats.prompt_tokens == 4 + 4 + 8
    assert (stats.cached_tokens, stats.fetched_tokens) == (4, 0)
    assert sum(count for _, count in stats.misses) <= 3


def test_match_asks_each_worker() -> None:
    world = World(watch=True)
    one, two = FakeWorker(world, [full(8)], 2, "w0"), FakeWorker(world, [full(8)], 2, "w1")
    one.run([1, 2, 3, 4])
    two.run([1, 2])
    found = world.manager.match(NS, pack([1, 2, 3, 4, 5]))
    assert [(m.worker_id, m.match.usable_tokens) for m in found] == [("w0", 4), ("w1", 2)]


def test_hashes_are_the_same_on_every_worker_and_in_every_manager() -> None:
    hashes = []
    for name in ("w0", "w1"):
        worker = FakeWorker(World(watch=True), [full(8)], 2, name)
        worker.run(span(1, 9))
        (stored,) = told(worker)
        assert isinstance(stored, Stored)
        hashes.append(stored.page_hashes)
    digest = namespace_digest(NS)
    whole = page_hashes(digest, b"", pack(span(1, 8)), 8)
    assert hashes[0] == hashes[1] == tuple(PageHash(whole[i : i + 32]) for i in range(0, len(whole), 32))


def test_an_unwatched_manager_decides_the_same() -> None:
    told_apart = []
    for watch in (True, False):
        world = World(watch=watch)
        worker = FakeWorker(world, [full(6), window(6, 4)], 2)
        for i in range(20):
            live = worker.submit([i % 3, i % 2, i % 5, 1, i % 2, 0, i % 7])
            if hasattr(live, "grant"):
                worker.prefill(live)  # type: ignore[arg-type]
                worker.release(live)  # type: ignore[arg-type]
        told_apart.append([g._replace() for g in world.manager.stats().workers[0].groups])
        assert watch or world.events == []
    assert told_apart[0] == told_apart[1]


def test_e21_nodes_grow_with_branches_not_with_tokens() -> None:
    world = World()
    worker = FakeWorker(world, [full(40_000)], 4)
    manager = world.manager
    shared = span(1, 1000)
    for i in range(300):
        tokens = pack([*shared, *range(10_000 * (i + 1), 10_000 * (i + 1) + 100)])
        acquire = Acquire(SequenceId(i + 1), NS, tokens)
        grant = manager.acquire(WorkerId("w0"), acquire)
        assert hasattr(grant, "tables")
        manager.publish(WorkerId("w0"), Publish(SequenceId(i + 1), b"", 1100))
        manager.release(WorkerId("w0"), Release(SequenceId(i + 1), FINISHED))
    (stats,) = manager.stats().workers
    assert stats.num_nodes == 301
    assert stats.groups[0].num_pages - stats.groups[0].num_free == 250 + 300 * 25
    world.settle()
    assert worker.id == "w0"
