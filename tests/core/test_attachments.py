"""Attached engines: what a lookup finds, what leases and tickets hold, and who is fenced."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.attachments.messages import Commit, GroupRange, LeaseEnd
from cache_service.core.base.errors import Detached, LeasesInScope
from cache_service.core.host.host_tiers import MAX_UNUSED_TIERS
from session.messages import Hello
from session.words import HASH_BYTES, GroupKind, GroupSpec, HostTierKind, MissReason, Namespace, WorkerId
from tests.core.at_once import clear_at_once
from tests.core.attached import (
    CORRUPT,
    DONE,
    FAILED,
    FULL,
    MISSING,
    PAGE_BYTES,
    PAGE_TOKENS,
    STATE,
    TIER,
    WINDOW,
    Stage,
    path,
    token_path,
)

PROMPT = path(range(10))


def test_what_one_engine_wrote_another_one_finds() -> None:
    stage = Stage()
    first, second = stage.engine(), stage.engine()
    reserved = first.save(PROMPT, 0, 10)
    assert [page.pages for page in reserved.pages] == [tuple(range(10))]
    found = second.lookup(PROMPT)
    assert (found.usable_pages, found.matched_pages, found.miss_reason) == (10, 10, MissReason.NONE)
    assert found.lease and second.is_written(found)
    assert second.release(LeaseEnd(found.lease, DONE, 10)) == 1
    stats = stage.manager.stats()
    assert (stats.host_tier.num_fetched_pages, stats.attachments.usable_pages) == (10, 10)
    assert not second.reserve(PROMPT, GroupRange(0, 0, 10)).ticket, "it is all there"


def test_pages_after_those_that_the_engine_holds() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 4, 8)
    assert engine.lookup(PROMPT).usable_pages == 0
    found = engine.lookup(PROMPT, local=4)
    assert found.usable_pages == 8 and found.pages[0].pages == (4, 5, 6, 7)
    assert engine.lookup(PROMPT, local=9).usable_pages == 9


def test_tokens_are_chained_by_the_service_and_the_last_one_is_computed() -> None:
    stage = Stage()
    engine = stage.engine()
    tokens = list(range(5 * PAGE_TOKENS))
    engine.save(token_path(tokens), 0, 5)
    found = engine.lookup(token_path(tokens))
    assert (found.usable_pages, found.miss_reason) == (4, MissReason.PAGE_TAIL)
    assert engine.lookup(token_path([*tokens, 1])).usable_pages == 5
    assert engine.lookup(token_path([9, *tokens[1:]])).usable_pages == 0, "a first token that differs changes all"
    assert engine.lookup(token_path(tokens, salt="other")).usable_pages == 0


def test_the_same_ids_under_another_salt_are_other_pages() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(path(range(3), salt="a"), 0, 3)
    assert engine.lookup(path(range(3), salt="b")).miss_reason is MissReason.NEVER_SEEN
    assert engine.lookup(path(range(3))).usable_pages == 0
    assert engine.lookup(path(range(3), salt="a")).usable_pages == 3


@pytest.mark.parametrize("other", [{"fingerprint": b"g" * 32}, {"ranks": 2}, {"groups": (FULL, STATE)}])
def test_engines_whose_pages_differ_never_meet(other: dict[str, Any]) -> None:
    stage = Stage()
    stage.engine().save(PROMPT, 0, 4)
    engine = stage.engine(*other.pop("groups", (FULL,)), **other)
    assert engine.lookup(PROMPT).usable_pages == 0


def test_an_engine_never_meets_the_rows_of_a_worker() -> None:
    """Also not one that names a worker's fingerprint: its groups would be counted with the wrong sizes."""
    stage = Stage()
    groups = (GroupSpec("full", GroupKind.FULL, 100, 4096),)
    hello = Hello(WorkerId("w"), "h:1", "i1", b"f" * 32, PAGE_TOKENS, groups, HostTierKind.SHARED, TIER)
    stage.manager.hello(hello, stage.now_ms)
    stage.engine(fingerprint=b"f" * 32)
    index = stage.manager.tiers.shared[TIER]
    assert index.group_bytes[b"f" * 32] == (4096,) and len(index.group_bytes) == 2


def test_window_and_state_rules() -> None:
    stage = Stage()
    engine = stage.engine(FULL, WINDOW, STATE)
    reserved = engine.reserve(
        PROMPT, GroupRange(0, 0, 10), GroupRange(1, 4, 2), GroupRange(2, 5, 1), GroupRange(2, 8, 1)
    )
    engine.write(reserved)
    found = engine.lookup(PROMPT)
    assert (found.usable_pages, found.matched_pages, found.limiting_group) == (6, 10, "window")
    assert found.miss_reason is MissReason.WINDOW_GONE
    assert [(page.group, page.pages) for page in found.pages] == [(0, tuple(range(6))), (1, (4, 5)), (2, (5,))]
    assert engine.is_written(found)


def test_a_snapshot_that_is_lacking() -> None:
    stage = Stage()
    engine = stage.engine(FULL, STATE)
    engine.write(engine.reserve(PROMPT, GroupRange(0, 0, 10), GroupRange(1, 2, 1)))
    found = engine.lookup(PROMPT)
    assert (found.usable_pages, found.limiting_group, found.miss_reason) == (3, "state", MissReason.NO_SNAPSHOT)


def test_a_row_is_findable_when_every_rank_has_committed() -> None:
    stage = Stage()
    engine = stage.engine(ranks=3)
    reserved = engine.reserve(PROMPT, GroupRange(0, 0, 10))
    assert [answer.num_findable for answer in engine.write(reserved, ranks=(0, 2))] == [0, 0]
    assert engine.lookup(PROMPT).usable_pages == 0
    (last,) = engine.write(reserved, ranks=(1,), most=4)
    assert last.num_findable == 4 and engine.lookup(PROMPT).usable_pages == 4
    left = [name for name in stage.store if name in engine.names(reserved.pages, 0)]
    assert len(left) == 4, "what one rank wrote in vain is deleted"


def test_a_commit_that_comes_again_changes_nothing() -> None:
    stage = Stage()
    engine = stage.engine(ranks=2)
    reserved = engine.reserve(PROMPT, GroupRange(0, 0, 2))
    engine.write(reserved, ranks=(0,))
    again = engine.write(reserved, ranks=(0,))
    assert again[0].is_open and engine.lookup(PROMPT).usable_pages == 0
    engine.write(reserved, ranks=(1,))
    assert not engine.write(reserved, ranks=(1,))[0].is_open
    assert engine.lookup(PROMPT).usable_pages == 2


def test_two_engines_do_not_write_the_same_page() -> None:
    stage = Stage()
    first, second = stage.engine(), stage.engine()
    reserved = first.reserve(PROMPT, GroupRange(0, 0, 5))
    assert [page.pages for page in second.reserve(PROMPT, GroupRange(0, 3, 4)).pages] == [(5, 6)]
    first.write(reserved, most=2)
    assert [page.pages for page in second.reserve(PROMPT, GroupRange(0, 0, 5)).pages] == [(2, 3, 4)]


def test_leases_keep_rows_from_the_quota() -> None:
    stage = Stage(host_quota_bytes=6 * PAGE_BYTES)
    engine = stage.engine()
    engine.save(PROMPT, 0, 3)
    lease = engine.lookup(PROMPT).lease
    engine.save(path("abc"), 0, 3)
    engine.save(path("xyz"), 0, 3)
    assert engine.lookup(PROMPT, lease=False).usable_pages == 3
    assert engine.lookup(path("abc"), lease=False).miss_reason is MissReason.EVICTED
    engine.release(LeaseEnd(lease, DONE, 3))
    engine.save(path("def"), 0, 3)
    engine.save(path("ghi"), 0, 3)
    assert engine.lookup(PROMPT, lease=False).miss_reason is MissReason.EVICTED


def test_nothing_is_reserved_beyond_what_the_quota_can_hold() -> None:
    stage = Stage(host_quota_bytes=6 * PAGE_BYTES)
    engine = stage.engine()
    engine.save(PROMPT, 0, 2)
    engine.lookup(PROMPT)
    reserved = engine.reserve(path("abcdefgh"), GroupRange(0, 0, 8))
    assert (reserved.pages[0].pages, reserved.num_refused) == ((0, 1, 2, 3), 4)
    assert engine.reserve(path("xyz"), GroupRange(0, 0, 3)).num_refused == 3
    engine.write(reserved)
    assert stage.manager.stats().host_tier.num_bytes == 6 * PAGE_BYTES


def test_leases_and_tickets_expire() -> None:
    stage = Stage(host_lease_ms=100, max_spill_ms=200)
    engine = stage.engine()
    engine.save(PROMPT, 0, 3)
    found = engine.lookup(PROMPT)
    reserved = engine.reserve(path("ab"), GroupRange(0, 0, 2))
    stage.tick(100)
    assert engine.release(LeaseEnd(found.lease, MISSING, 0)) == 0
    assert engine.lookup(PROMPT, lease=False).usable_pages == 3, "an ended lease drops no row"
    stage.tick(100)
    assert not engine.write(reserved)[0].is_open
    assert engine.lookup(path("ab")).usable_pages == 0
    stats = stage.manager.stats().attachments
    assert (stats.num_expired_leases, stats.num_expired_tickets, stats.num_tickets) == (1, 1, 0)


def test_a_ticket_that_is_withdrawn_keeps_no_key_of_before() -> None:
    """A delete that was taken while a page was to be written anew is left to its writer. There was none."""
    stage = Stage()
    engine, index = stage.engine(FULL, STATE), stage.manager.tiers.shared[TIER]
    ranges = GroupRange(0, 0, 4), GroupRange(1, 2, 2)
    engine.write(engine.reserve(PROMPT, *ranges))
    for key in index.all_keys():
        index.forget(key[:-HASH_BYTES], key[-HASH_BYTES:], MissReason.EVICTED)
    reserved = engine.reserve(PROMPT, GroupRange(0, 1, 3))
    assert stage.store == set(engine.names(reserved.pages, 0)), "those of the ticket are passed over"
    stage.manager.attachments.withdraw(engine.attachment(), reserved.ticket)
    again = engine.reserve(PROMPT, GroupRange(0, 3, 1))
    assert stage.store == set(engine.names(again.pages, 0))
    engine.write(again)
    stage.manager.attachments.withdraw(engine.attachment(), again.ticket)
    stage.settle()
    assert stage.store == set(engine.names(again.pages, 0)), "it was written, and has ended"
    assert stage.manager.stats().attachments.given_up_pages == 3


def test_keys_of_an_expired_ticket_are_deleted() -> None:
    stage = Stage(max_spill_ms=200)
    engine = stage.engine()
    reserved = engine.reserve(path("ab"), GroupRange(0, 0, 2))
    stage.store.update(engine.names(reserved.pages, 0))
    stage.tick(200)
    assert not stage.store


@pytest.mark.parametrize(("status", "counter"), [(MISSING, "num_missing_pages"), (CORRUPT, "num_corrupt_pages")])
def test_a_page_that_was_not_there_is_a_miss_from_then_on(status: Any, counter: str) -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 0, 5)
    engine.release(LeaseEnd(engine.lookup(PROMPT).lease, status, 2))
    assert engine.lookup(PROMPT).usable_pages == 2
    assert getattr(stage.manager.stats().host_tier, counter) == 1


def test_failures_open_the_breaker_and_then_nothing_is_found_or_taken() -> None:
    stage = Stage(breaker_failures=2, breaker_ms=1_000)
    engine = stage.engine()
    engine.save(PROMPT, 0, 5)
    engine.release(LeaseEnd(engine.lookup(PROMPT).lease, FAILED, 0))
    engine.commit(Commit(engine.reserve(path("ab"), GroupRange(0, 0, 2)).ticket, 0, FAILED))
    found, reserved = engine.lookup(PROMPT), engine.reserve(path("xy"), GroupRange(0, 0, 2))
    assert found.breaker_open and not found.usable_pages and reserved.breaker_open and not reserved.ticket
    stage.tick(1_000)
    assert engine.lookup(PROMPT).usable_pages == 5


def test_a_lost_store_ends_attachments_and_their_tickets() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 0, 5)
    reserved = engine.reserve(path("ab"), GroupRange(0, 0, 2))
    engine.lookup(PROMPT)
    stage.manager.host_lost(TIER)
    stage.settle()
    with pytest.raises(Detached):
        engine.write(reserved)
    engine = stage.engine()
    assert engine.lookup(PROMPT).usable_pages == 0
    assert not stage.manager.stats().host_tier.num_rows


def test_an_older_epoch_is_fenced() -> None:
    old, new = Stage(), Stage()
    new.manager.attachments._epoch = "another"
    engine = old.engine()
    reserved = engine.reserve(PROMPT, GroupRange(0, 0, 5))
    new.engine()
    engine.stage = new
    with pytest.raises(Detached, match=r"^call\.epoch: "):
        engine.write(reserved)
    assert not new.manager.stats().host_tier.num_rows


def test_silent_attachments_end_and_their_stores_are_forgotten() -> None:
    stage = Stage(attachment_idle_ms=1_000)
    engines = [stage.engine(tier=f"redis {number}") for number in range(MAX_UNUSED_TIERS + 3)]
    engines[0].save(PROMPT, 0, 2)
    engines[0].lookup(PROMPT)
    stage.tick(999)
    engines[1].lookup(PROMPT)
    stage.tick(1)
    with pytest.raises(Detached, match=r"^call\.attachment: "):
        engines[0].lookup(PROMPT)
    assert stage.manager.stats().attachments.num_attachments == 1
    assert len(stage.manager.tiers.shared) == MAX_UNUSED_TIERS + 1 and "redis 1" in stage.manager.tiers.shared


def test_a_clear_call() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 0, 5)
    engine.save(path(range(10), salt="a"), 0, 5)
    found = engine.lookup(PROMPT)
    with pytest.raises(LeasesInScope):
        clear_at_once(stage.manager, Namespace("model"), unused_only=False)
    assert clear_at_once(stage.manager, Namespace("model", "", "a"), unused_only=False).num_host_rows == 5
    engine.release(LeaseEnd(found.lease, DONE, 5))
    assert clear_at_once(stage.manager, Namespace("model"), unused_only=False).num_host_rows == 5
    stage.settle()
    assert engine.lookup(PROMPT).miss_reason is MissReason.CLEARED and not stage.store
    assert [page.pages for page in engine.reserve(PROMPT, GroupRange(0, 0, 2)).pages] == [(0, 1)]


def test_a_clear_call_of_the_unused_takes_held_rows_too() -> None:
    """Their readers find the values missing, which is a miss."""
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 0, 5)
    lease = engine.lookup(PROMPT).lease
    assert clear_at_once(stage.manager, None, unused_only=True).num_host_rows == 5
    stage.settle()
    engine.release(LeaseEnd(lease, MISSING, 0))
    assert not engine.lookup(PROMPT).usable_pages


def test_a_scan_after_a_restart_finds_the_rows_of_engines() -> None:
    stage = Stage()
    stage.engine(FULL, STATE).save(PROMPT, 0, 5)
    after = Stage()
    engine = after.engine(FULL, STATE)
    ((tier, fingerprint),) = after.manager.tiers.named()
    assert after.manager.tiers.add_scanned(tier, fingerprint, sorted(stage.store)) == 10
    assert engine.lookup(PROMPT).usable_pages == 5


def test_a_question_counts_nowhere_and_holds_nothing() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 0, 5)
    found = engine.lookup(PROMPT, lease=False)
    stats = stage.manager.stats().attachments
    assert (found.usable_pages, found.lease, stats.num_lookups, stats.num_leases) == (5, 0, 0, 0)
