"""Attached engines: what stays bounded, and bad input, which is named and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.attachments import attachments as module
from cache_service.core.attachments import lookup as looking
from cache_service.core.attachments.messages import Commit, GroupRange, LeaseEnd, Path, WrittenPages
from cache_service.core.base.errors import Detached, UnknownTicket
from session.errors import FieldError, InvalidInput, TooMany
from session.words import MissReason
from tests.core.attached import (
    DONE,
    MISSING,
    PAGE_BYTES,
    PAGE_TOKENS,
    TIER,
    Stage,
    path,
    token_path,
)

PROMPT = path(range(10))


def refused(engine: Any, ask: Any) -> FieldError:
    """The error; asserts that nothing changed but the time of the last call."""
    stage = engine.stage
    before = repr((stage.manager.stats(), stage.manager.tiers.shared[TIER].rows))
    with pytest.raises(FieldError) as error:
        ask()
    stage.settle()
    assert repr((stage.manager.stats(), stage.manager.tiers.shared[TIER].rows)) == before
    return error.value


def test_leases_and_the_pages_under_them_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(max_live_sequences=2)
    engine = stage.engine()
    engine.save(PROMPT, 0, 10)
    engine.lookup(PROMPT)
    monkeypatch.setattr(looking, "MAX_HELD_PAGES", 19)
    error = refused(engine, lambda: engine.lookup(PROMPT))
    assert isinstance(error, TooMany) and error.field == "lookup.lease"
    monkeypatch.undo()
    engine.lookup(PROMPT)
    assert isinstance(refused(engine, lambda: engine.lookup(PROMPT)), TooMany)


def test_tickets_are_bounded() -> None:
    engine = Stage(max_open_tickets=1).engine()
    engine.reserve(PROMPT, GroupRange(0, 0, 1))
    error = refused(engine, lambda: engine.reserve(PROMPT, GroupRange(0, 1, 1)))
    assert isinstance(error, TooMany) and error.field == "reserve"


def test_attachments_and_fingerprints_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(max_attachments=3, attachment_idle_ms=10)
    monkeypatch.setattr(module, "MAX_FINGERPRINTS", 2)
    stage.engine(fingerprint=b"a" * 32).save(PROMPT, 0, 2)
    stage.engine(fingerprint=b"b" * 32)
    with pytest.raises(TooMany, match=r"^attach\.fingerprint: "):
        stage.engine(fingerprint=b"c" * 32)
    stage.engine(fingerprint=b"b" * 32)
    with pytest.raises(TooMany, match=r"^attach: "):
        stage.engine()
    stage.tick(10)
    assert stage.engine(fingerprint=b"c" * 32).lookup(PROMPT).usable_pages == 0, "b left no row, so c takes its place"
    assert stage.engine(fingerprint=b"a" * 32).lookup(PROMPT).usable_pages == 2


def test_engines_that_ended_without_a_word_keep_nobody_out() -> None:
    stage = Stage(max_attachments=2, host_lease_ms=100)
    gone, busy = stage.engine(), stage.engine()
    gone.save(PROMPT, 0, 2)
    reserved = gone.reserve(path("ab"), GroupRange(0, 0, 2))
    stage.now_ms += 99
    busy.lookup(PROMPT)
    with pytest.raises(TooMany, match=r"^attach: "):
        stage.engine()
    stage.now_ms += 1
    assert stage.engine().lookup(PROMPT).usable_pages == 2
    assert busy.lookup(PROMPT).usable_pages == 2
    with pytest.raises(Detached):
        gone.write(reserved)
    with pytest.raises(TooMany, match=r"^attach: "):
        stage.engine()


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("lookup.local_pages", lambda e: e.lookup(PROMPT, local=11)),
        ("reserve.ranges[1].group", lambda e: e.reserve(PROMPT, GroupRange(0, 0, 1), GroupRange(1, 0, 1))),
        ("reserve.ranges[0].num_pages", lambda e: e.reserve(PROMPT, GroupRange(0, 0, 0))),
        ("reserve.ranges[0].num_pages", lambda e: e.reserve(PROMPT, GroupRange(0, 9, 2))),
        ("commit.rank", lambda e: e.commit(Commit(1, 1, DONE))),
        ("commit.status", lambda e: e.commit(Commit(1, 0, MISSING))),
        ("commit.ticket", lambda e: e.commit(Commit(2, 0, DONE))),
        ("commit.ticket", lambda e: e.commit(Commit(0, 0, DONE))),
        ("commit.written[0].group", lambda e: e.commit(Commit(1, 0, DONE, (WrittenPages(1, 1, PAGE_BYTES),)))),
        ("commit.written[1].group", lambda e: e.commit(Commit(1, 0, DONE, (WrittenPages(0, 1, PAGE_BYTES),) * 2))),
        ("commit.written[0].num_pages", lambda e: e.commit(Commit(1, 0, DONE, (WrittenPages(0, 3, 3 * PAGE_BYTES),)))),
        ("commit.written[0].num_bytes", lambda e: e.commit(Commit(1, 0, DONE, (WrittenPages(0, 2, PAGE_BYTES),)))),
        ("release.ends[0].lease", lambda e: e.release(LeaseEnd(2, DONE))),
        ("release.ends[1].num_pages", lambda e: e.release(LeaseEnd(1, DONE), LeaseEnd(1, DONE, 4))),
    ],
)
def test_bad_input(field: str, ask: Any) -> None:
    engine = Stage().engine()
    engine.save(PROMPT, 0, 3)
    engine.lookup(PROMPT)
    engine.reserve(path("ab"), GroupRange(0, 0, 2))
    if field.startswith("commit"):
        # Ticket 1 was committed by `save`; the open one is 2, and the next was never issued.
        wrong = ask
        ask = lambda e: wrong(_Renumbered(e))  # noqa: E731
    error = refused(engine, lambda: ask(engine))
    assert isinstance(error, InvalidInput | UnknownTicket) and error.field == field


class _Renumbered:
    """Ticket 1 of the table is the open one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def commit(self, said: Commit) -> Any:
        return self._engine.commit(said._replace(ticket=said.ticket and said.ticket + 1))


def test_a_path_without_pages_finds_nothing() -> None:
    engine = Stage().engine()
    found = engine.lookup(Path())
    assert (found.usable_pages, found.lease, found.miss_reason) == (0, 0, MissReason.NONE)
    assert engine.lookup(token_path([1])).miss_reason is MissReason.NONE
    assert engine.lookup(token_path(range(PAGE_TOKENS))).miss_reason is MissReason.PAGE_TAIL
