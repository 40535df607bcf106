"""Explain for attached engines: how far a path could be resumed, group by group, and why no further."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cache_service.core.attachments import attachment as module
from cache_service.core.attachments import explaining
from cache_service.core.attachments.messages import Commit, ExplainedPath, GroupRange, LeaseEnd, Lookup, Path
from cache_service.core.base.errors import UnknownAttachment
from cache_service.core.base.fetch_estimate import FetchRates
from cache_service.core.base.types import AttachmentExplanation
from session.errors import InvalidInput, TooMany
from session.words import GroupKind, MissReason, Namespace
from tests.core.at_once import clear_at_once, to_the_end
from tests.core.attached import (
    CORRUPT,
    DONE,
    FULL,
    LAYOUTS,
    PAGE_BYTES,
    PAGE_TOKENS,
    STATE,
    WINDOW,
    Engine,
    Stage,
    path,
    ranges,
    token_path,
)

PROMPT = path(range(10))


def explained(stage: Stage, asked: Path | None, attachment: int = 0, model: str = "model") -> list[Any]:
    question = ExplainedPath(attachment, "" if attachment else model, asked)
    before = repr(stage.manager.stats())
    told = to_the_end(stage.manager.attachments.explaining(question, stage.now_ms))
    assert repr(stage.manager.stats()) == before
    return list(told)


def of(engine: Engine, asked: Path | None = PROMPT) -> AttachmentExplanation:
    (told,) = explained(engine.stage, asked, engine.attached.attachment)
    assert isinstance(told, AttachmentExplanation)
    return told


def test_what_is_there_and_what_never_was() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 0, 4)
    told = of(engine)
    assert (told.num_pages, told.matched_pages, told.usable_pages) == (10, 4, 4)
    assert (told.usable_tokens, told.page_tokens) == (4 * PAGE_TOKENS, PAGE_TOKENS)
    (full,) = told.groups
    assert full == ("full", GroupKind.FULL, 4, 4, 4, 4, MissReason.NEVER_SEEN, 0, False)
    assert "wrote page 4" in told.notes[0] and told.lookup_age_ms is None
    everything = of(engine, path(range(4)))
    assert (everything.usable_pages, everything.miss_reason) == (4, MissReason.NONE)
    assert everything.groups[0].missing_page is None and everything.limiting_group == ""


def test_windows_states_and_latents_each_say_what_they_have() -> None:
    latent = FULL._replace(name="latent", replicated=True)
    stage = Stage()
    engine = stage.engine(FULL, latent, WINDOW, STATE)
    for group, first, end in ((0, 0, 9), (1, 0, 8), (2, 3, 7), (3, 4, 5)):
        engine.write(engine.reserve(PROMPT, GroupRange(group, first, end - first)))
    told = of(engine)
    assert (told.matched_pages, told.usable_pages, told.limiting_group) == (8, 5, "window")
    assert told.miss_reason is MissReason.WINDOW_GONE
    rows = [
        (one.name, one.leading_pages, one.resident_pages, one.usable_pages, one.missing_page) for one in told.groups
    ]
    assert rows == [("full", 9, 9, 9, 9), ("latent", 8, 8, 8, 8), ("window", 0, 4, 7, 7), ("state", 0, 1, 5, 5)]
    assert {one.miss_reason for one in told.groups} == {MissReason.NEVER_SEEN}
    assert [one.replicated for one in told.groups] == [False, True, False, False]


@pytest.mark.parametrize("groups", LAYOUTS)
def test_it_says_what_a_lookup_grants(groups: Any) -> None:
    """And each group's boundary follows from the pages that are there: any later one, and the limiting page lacks."""
    drawn = random.Random(str(groups))
    for _ in range(30):
        stage = Stage()
        engine = stage.engine(*groups)
        for group in range(len(groups)):
            for page in range(10):
                if drawn.random() < 0.7:
                    engine.write(engine.reserve(PROMPT, GroupRange(group, page, 1)))
        told, found = of(engine), engine.lookup(PROMPT)
        assert (told.usable_pages, told.matched_pages) == (found.usable_pages, found.matched_pages)
        assert (told.limiting_group, told.miss_reason) == (found.limiting_group, found.miss_reason)
        assert told.usable_pages <= min(one.usable_pages for one in told.groups)
        fewest = min(told.groups, key=lambda one: one.usable_pages)
        if fewest.missing_page is not None:
            number = told.groups.index(fewest)
            engine.write(engine.reserve(PROMPT, GroupRange(number, fewest.missing_page, 1)))
            assert of(engine).groups[number].usable_pages > fewest.usable_pages


def test_the_missing_page_says_what_became_of_it() -> None:
    stage = Stage(host_quota_bytes=6 * PAGE_BYTES)
    engine = stage.engine()
    engine.save(PROMPT, 0, 6)
    engine.save(path("abc"), 0, 3)
    evicted = of(engine)
    assert (evicted.groups[0].missing_page, evicted.groups[0].miss_reason) == (3, MissReason.EVICTED)
    lease = engine.lookup(path("abc")).lease
    engine.save(path("defg"), 0, 4)
    assert of(engine, path("defg")).groups[0].miss_reason is MissReason.REFUSED
    engine.release(LeaseEnd(lease, CORRUPT, 1))
    damaged = of(engine, path("abc"))
    assert (damaged.usable_pages, damaged.miss_reason) == (1, MissReason.DAMAGED)
    assert "page 1 failed its checks" in damaged.notes[0]
    clear_at_once(stage.manager, Namespace("model"), unused_only=True)
    assert of(engine, path("defg")).miss_reason is MissReason.CLEARED


def test_pages_that_are_being_written_are_told() -> None:
    engine = Stage().engine()
    ticket = engine.reserve(PROMPT, GroupRange(0, 0, 3)).ticket
    told = of(engine)
    assert told.groups[0].writing_pages == 3 and "3 pages of group full are being written now." in told.notes
    engine.commit(Commit(ticket, 0, DONE))
    assert of(engine).groups[0].miss_reason is MissReason.NOT_WRITTEN and not of(engine).groups[0].writing_pages


def test_a_store_that_fails_is_told_with_what_it_has() -> None:
    stage = Stage(breaker_failures=1)
    engine = stage.engine()
    engine.save(PROMPT, 0, 5)
    engine.attachment().view.index.breaker.failed(stage.now_ms)
    told = of(engine)
    assert (told.usable_pages, told.miss_reason) == (0, MissReason.BREAKER_OPEN)
    assert (told.groups[0].leading_pages, told.groups[0].miss_reason) == (5, MissReason.NEVER_SEEN)


def test_the_lookup_that_missed_last_is_kept() -> None:
    stage = Stage()
    engine = stage.engine()
    with pytest.raises(InvalidInput, match=r"^request\.page_ids: "):
        of(engine, None)
    engine.save(PROMPT, 2, 6)
    engine.lookup(path(range(6)), local=2)
    assert (of(engine, None).usable_pages, of(engine, None).local_pages) == (6, 2)
    engine.lookup(PROMPT, local=2)
    stage.now_ms += 700
    engine.lookup(path(range(6)), local=2)
    engine.lookup(path("xyz"), lease=False)
    told = of(engine, None)
    assert (told.num_pages, told.local_pages, told.usable_pages, told.lookup_age_ms) == (10, 2, 6, 700)
    assert told.groups[0].leading_pages == 6 and told.miss_reason is MissReason.NEVER_SEEN


def test_of_a_long_lookup_the_beginning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 4 * 32)
    engine = Stage().engine()
    engine.lookup(PROMPT, local=6)
    told = of(engine, None)
    assert (told.num_pages, told.local_pages) == (4, 4)
    assert told.notes[-1] == "The Lookup was of a longer path; this is its beginning."


def test_what_is_computed_sooner_is_told() -> None:
    stage = Stage()
    engine = stage.engine()
    engine.save(PROMPT, 0, 10)
    rates = FetchRates(PAGE_TOKENS * 1e6, PAGE_BYTES * 1.0)
    stage.manager.attachments.lookup(engine.attachment(), Lookup(PROMPT, rates=rates), stage.now_ms)
    for asked in (None, PROMPT):
        told = of(engine, asked)
        assert (told.usable_pages, told.declined_pages, told.miss_reason) == (0, 10, MissReason.FETCH_SLOWER)
        assert told.notes[0].startswith("10 more pages are there")


def test_tokens_are_taken_too() -> None:
    engine = Stage().engine()
    asked = token_path(range(5 * PAGE_TOKENS))
    engine.save(asked, 0, 5)
    told = of(engine, asked)
    assert (told.num_pages, told.usable_pages, told.miss_reason) == (4, 4, MissReason.PAGE_TAIL)
    engine.lookup(asked)
    assert of(engine, PROMPT).notes[-1] == "This engine asks by tokens: other pages than these."


def test_engines_of_a_model_that_share_nothing_are_named() -> None:
    stage = Stage()
    first, twin, other = stage.engine(), stage.engine(), stage.engine(fingerprint=b"g" * 32)
    first.save(PROMPT, 0, 10)
    told = {one.attachment: one for one in explained(stage, PROMPT)}
    assert [told[engine.attached.attachment].usable_pages for engine in (first, twin, other)] == [10, 10, 0]
    assert told[1].notes[-1].startswith("Of the same model, and sharing no page with it: attachment 3. ")
    assert told[3].notes[-1].startswith("Of the same model, and sharing no page with it: attachment 1, 2. ")


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_another_tenants_pages_are_not_there(salt: str) -> None:
    engine = Stage().engine()
    engine.save(path(range(10), salt="tenant"), 0, 10)
    assert of(engine, path(range(10), salt=salt)).usable_pages == (10 if salt else 0)


def test_bad_questions() -> None:
    stage = Stage()
    engine = stage.engine()
    with pytest.raises(UnknownAttachment, match=r"^request\.attachment: "):
        explained(stage, PROMPT, 7)
    with pytest.raises(UnknownAttachment, match=r"^request\.namespace\.model: "):
        explained(stage, PROMPT, model="another")
    with pytest.raises(InvalidInput, match=r"^request\.namespace\.model: "):
        question = ExplainedPath(engine.attached.attachment, "another", PROMPT)
        to_the_end(stage.manager.attachments.explaining(question, 0))
    with pytest.raises(TooMany, match=r"^request\.tokens: "):
        of(engine, token_path([0] * (16_385 * PAGE_TOKENS)))


def test_other_calls_come_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that goes away meanwhile does no harm."""
    monkeypatch.setattr(explaining, "SLICE_PAGES", 2)
    stage = Stage(attachment_idle_ms=1_000)
    engine, _ = stage.engine(FULL, WINDOW), stage.engine()
    engine.save(PROMPT, 0, 10)
    asking = stage.manager.attachments.explaining(ExplainedPath(0, "model", PROMPT), stage.now_ms)
    assert sum(1 for _ in zip(asking, range(7), strict=False)) == 7
    stage.tick(1_000)
    assert not stage.manager.attachments.all
    first, second = to_the_end(asking)
    assert (first.usable_pages, second.usable_pages) == (10, 0)


def test_ranges_of_all_groups() -> None:
    """A path of nothing but holes."""
    engine = Stage().engine(WINDOW, STATE)
    engine.write(engine.reserve(PROMPT, *ranges(engine.groups, 9, 10)))
    told = of(engine)
    assert (told.usable_pages, told.limiting_group) == (0, "window")
    assert [(one.resident_pages, one.usable_pages) for one in told.groups] == [(1, 0), (1, 10)]
