"""Attached engines: why a page is not there, and what is counted of each engine."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.attachments import attachments as module
from cache_service.core.attachments.messages import Commit, GroupRange, LeaseEnd, WrittenPages
from cache_service.core.base.stats import AttachedEngine
from session.words import MissReason
from tests.core.attached import (
    CORRUPT,
    DONE,
    FAILED,
    FULL,
    MISSING,
    PAGE_BYTES,
    STATE,
    Engine,
    Stage,
    path,
)

PROMPT = path(range(10))


def why(engine: Engine) -> MissReason:
    return engine.lookup(PROMPT, lease=False).miss_reason


def counted(engine: Engine) -> AttachedEngine:
    return engine.attachment().stats()


def written(count: int) -> tuple[WrittenPages, ...]:
    return (WrittenPages(0, count, count * PAGE_BYTES),)


@pytest.mark.parametrize(("status", "reason"), [(MISSING, MissReason.LOST), (CORRUPT, MissReason.DAMAGED)])
def test_a_value_that_was_not_right_says_so(status: Any, reason: MissReason) -> None:
    engine = Stage().engine()
    engine.save(PROMPT, 0, 5)
    engine.release(LeaseEnd(engine.lookup(PROMPT).lease, status, 2))
    assert why(engine) is reason
    assert (counted(engine).usable_pages, counted(engine).fetched_pages) == (5, 2)
    engine.save(PROMPT, 0, 10)
    assert why(engine) is MissReason.NONE


def test_what_finds_no_room_under_the_quota_is_refused() -> None:
    stage = Stage(host_quota_bytes=6 * PAGE_BYTES)
    engine = stage.engine()
    engine.save(path("abcdef"), 0, 6)
    lease = engine.lookup(path("abcdef")).lease
    assert engine.reserve(PROMPT, GroupRange(0, 0, 3)).num_refused == 3
    assert why(engine) is MissReason.REFUSED
    assert (counted(engine).reserved_pages, counted(engine).refused_pages) == (6, 3)
    engine.release(LeaseEnd(lease, DONE, 6))
    engine.save(PROMPT, 0, 6)
    engine.save(path("abcdef"), 0, 6)
    assert why(engine) is MissReason.EVICTED, "it was written since, and is gone"


def test_what_a_full_store_does_not_take_is_refused() -> None:
    engine = Stage().engine()
    engine.write(engine.reserve(PROMPT, GroupRange(0, 0, 5)), most=3)
    assert engine.lookup(PROMPT).usable_pages == 3 and why(engine) is MissReason.REFUSED
    told = counted(engine)
    assert (told.reserved_pages, told.committed_pages, told.refused_pages, told.given_up_pages) == (5, 3, 2, 0)


@pytest.mark.parametrize("how", ["failed", "silent", "late", "breaker"])
def test_what_is_given_up_says_so(how: str) -> None:
    stage = Stage(breaker_failures=1, breaker_ms=1_000, max_spill_ms=5_000)
    engine = stage.engine()
    if how == "breaker":
        engine.attachment().view.index.breaker.failed(stage.now_ms)
        assert engine.reserve(PROMPT, GroupRange(0, 0, 5)).breaker_open
    else:
        ticket = engine.reserve(PROMPT, GroupRange(0, 0, 5)).ticket
        if how == "failed":
            engine.commit(Commit(ticket, 0, FAILED))
        elif how == "silent":
            engine.commit(Commit(ticket, 0, DONE))
    assert why(engine) is {"silent": MissReason.NOT_WRITTEN, "late": MissReason.NEVER_SEEN}.get(
        how, MissReason.BREAKER_OPEN
    )
    stage.tick(5_000)
    assert why(engine) is MissReason.NOT_WRITTEN
    told = counted(engine)
    assert (told.committed_pages, told.refused_pages, told.given_up_pages) == (0, 0, 5)


def test_a_commit_without_pages_does_not_say_that_the_store_answers() -> None:
    stage = Stage(breaker_failures=2)
    engine = stage.engine()
    breaker = engine.attachment().view.index.breaker
    breaker.failed(stage.now_ms)
    engine.commit(Commit(engine.reserve(PROMPT, GroupRange(0, 0, 5)).ticket, 0, DONE))
    assert breaker.failures == 1
    engine.commit(Commit(engine.reserve(PROMPT, GroupRange(0, 0, 5)).ticket, 0, DONE, written(5)))
    assert not breaker.failures


def test_reasons_are_of_one_group() -> None:
    """Of a page that was evicted whole and written again without its state the state says why, and it alone."""
    stage = Stage(host_quota_bytes=3 * 2 * PAGE_BYTES)
    engine = stage.engine(FULL, STATE)
    engine.save(PROMPT, 0, 2)
    engine.save(path("abc"), 0, 3)
    index, fingerprint = engine.attachment().view.index, engine.attachment().view.fingerprint
    page_hash = engine.attachment().hashes(PROMPT).run(0, 1)[0]
    gone: Any = index.drop_listener
    assert [gone.why(fingerprint + page_hash, group) for group in (0, 1, 2)] == [
        MissReason.EVICTED,
        MissReason.EVICTED,
        MissReason.NEVER_SEEN,
    ]
    full_only = engine.reserve(path("x"), GroupRange(0, 0, 1))
    engine.write(full_only)
    engine.save(path("defg"), 0, 3)
    page_hash = full_only.pages[0].page_hashes[0]
    assert [gone.why(fingerprint + page_hash, group) for group in (0, 1)] == [MissReason.EVICTED, MissReason.NEVER_SEEN]


def test_each_attachment_is_counted_and_its_engine_beyond_its_end() -> None:
    stage = Stage(attachment_idle_ms=1_000)
    first, second = stage.engine(), stage.engine()
    first.save(PROMPT, 0, 5)
    lease = second.lookup(PROMPT).lease
    second.release(LeaseEnd(lease, DONE, 5))
    one, two = stage.manager.stats().attachments.engines
    assert (one.engine, one.committed_pages, one.num_lookups) == ("engine", 5, 0)
    assert (two.attachment, two.num_lookups, two.asked_pages, two.usable_pages, two.fetched_pages) == (2, 1, 10, 5, 5)
    assert two.misses == ((MissReason.NEVER_SEEN, 1),) and one.key_prefix == two.key_prefix
    open_ticket = second.reserve(path("ab"), GroupRange(0, 0, 2)).ticket
    stage.tick(1_000)
    stats = stage.manager.stats()
    assert open_ticket and not stats.attachments.engines and not stats.attachments.num_attachments
    ((label, by_engine),) = stats.by_engine
    assert label == "engine" and by_engine == stats.attachments
    assert (by_engine.committed_pages, by_engine.usable_pages, by_engine.given_up_pages) == (5, 5, 2)


def test_names_of_engines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LABELS", 2)
    stage = Stage()
    for number in range(4):
        stage.engine(name=f"engine {number}").save(path([number]), 0, 1)
    told = {label: counted.committed_pages for label, counted in stage.manager.stats().by_engine}
    assert told == {"engine 0": 1, "engine 1": 1, "other": 2}
    assert stage.manager.stats().attachments.committed_pages == 4
