"""Attached engines: what is not fetched because computing is faster, what one rank writes for all, and what is written
while the scan after a restart is under way."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service.core.attachments.messages import Commit, Found, Lookup, WrittenPages
from cache_service.core.base.fetch_estimate import DOUBLING_MS, FetchRates
from cache_service.core.base.types import FetchPolicy
from session.errors import InvalidInput
from session.words import MissReason
from tests.core.at_once import clear_at_once
from tests.core.attached import (
    DONE,
    FAILED,
    FULL,
    PAGE_BYTES,
    PAGE_TOKENS,
    STATE,
    TIER,
    Engine,
    Stage,
    path,
    ranges,
)

PROMPT = path(range(10))
LATENT = FULL._replace(name="latent", replicated=True)
# A page's bytes take 1 ms by the first rate; its tokens take 2 ms, or half of one.
READS = float(PAGE_BYTES * 1_000)
SLOW, FAST = PAGE_TOKENS * 500.0, PAGE_TOKENS * 2_000.0


def asked(engine: Engine, compute: float, fetch: float = READS, local: int = 0, lease: bool = True) -> Found:
    stage = engine.stage
    lookup = Lookup(PROMPT, local, lease, FetchRates(compute, fetch))
    found = stage.manager.attachments.lookup(engine.attachment(), lookup, stage.now_ms)
    stage.settle()
    return found


def stored(**config: Any) -> Engine:
    engine = Stage(**config).engine()
    engine.save(PROMPT, 0, 10)
    return engine


@pytest.mark.parametrize("lease", [True, False])
def test_what_is_computed_sooner_is_not_granted(lease: bool) -> None:
    engine = stored()
    declined = asked(engine, FAST, local=2, lease=lease)
    assert declined == Found(2, 10, miss_reason=MissReason.FETCH_SLOWER, declined_pages=8)
    granted = asked(engine, SLOW, local=2, lease=lease)
    assert (granted.usable_pages, granted.declined_pages, bool(granted.lease)) == (10, 0, lease)
    misses = dict(engine.stage.manager.stats().attachments.misses)
    assert misses == ({MissReason.FETCH_SLOWER: 1, MissReason.NONE: 1} if lease else {})


@pytest.mark.parametrize("rates", [(0.0, READS), (FAST, 0.0), (0.0, 0.0)])
def test_without_both_rates_everything_is_granted(rates: tuple[float, float]) -> None:
    assert asked(stored(), *rates).usable_pages == 10


def test_a_service_that_always_fetches_declines_nothing() -> None:
    assert asked(stored(fetch=FetchPolicy.ALWAYS), FAST).usable_pages == 10


def test_a_slow_moment_of_the_store_is_not_remembered_for_ever() -> None:
    engine = stored(attachment_idle_ms=10 * DOUBLING_MS)
    assert not asked(engine, FAST).lease
    engine.stage.now_ms += 2 * DOUBLING_MS
    assert asked(engine, FAST).lease, "the rate counts four times by now"


def test_all_bytes_of_all_groups_count() -> None:
    stage = Stage()
    engine = stage.engine(FULL, STATE._replace(page_bytes=100 * PAGE_BYTES))
    engine.save(PROMPT, 0, 10)
    # Ten pages and a snapshot as large as a hundred: 110 ms against 20.
    assert asked(engine, SLOW).declined_pages == 10


# Replicated groups.


def test_of_a_replicated_group_one_rank_writes_what_all_read() -> None:
    stage = Stage()
    first, second = stage.engine(LATENT, ranks=4), stage.engine(LATENT, ranks=4)
    reserved = first.reserve(PROMPT, *ranges(first.groups, 0, 10))
    (answer,) = first.write(reserved, ranks=[0])
    assert answer.num_findable == 10, "the ticket waits for no other rank"
    index = stage.manager.tiers.shared[TIER]
    assert index.quota.num_bytes == 10 * PAGE_BYTES and len(stage.store) == 10
    assert second.lookup(PROMPT).usable_pages == 10
    clear_at_once(stage.manager, None, unused_only=True)
    stage.settle()
    assert not stage.store, "the keys that were written are those that are deleted"


def test_beside_it_other_groups_are_of_all_ranks() -> None:
    stage = Stage()
    engine = stage.engine(LATENT, FULL, ranks=2)
    reserved = engine.reserve(PROMPT, *ranges(engine.groups, 0, 10))
    both = tuple(WrittenPages(group, 10, 10 * PAGE_BYTES) for group in (0, 1))
    with pytest.raises(InvalidInput, match="rank 0 writes it for all"):
        engine.commit(Commit(reserved.ticket, 1, DONE, both))
    assert engine.commit(Commit(reserved.ticket, 1, DONE, both[1:])).num_findable == 0
    assert engine.commit(Commit(reserved.ticket, 0, DONE, both)).num_findable == 10
    assert engine.lookup(PROMPT).usable_pages == 10
    assert stage.manager.tiers.shared[TIER].quota.num_bytes == 10 * 3 * PAGE_BYTES


def test_replicated_or_not_are_other_pages() -> None:
    stage = Stage()
    stage.engine(FULL._replace(name="latent")).save(PROMPT, 0, 10)
    assert stage.engine(LATENT).lookup(PROMPT).usable_pages == 0


@pytest.mark.parametrize("replicated", [True, False])
def test_a_scan_finds_a_replicated_page_by_its_one_key(replicated: bool) -> None:
    group = FULL._replace(replicated=replicated)
    stage = Stage()
    writer = stage.engine(group, ranks=2)
    writer.save(PROMPT, 0, 10) if not replicated else writer.write(
        writer.reserve(PROMPT, *ranges(writer.groups, 0, 10)), ranks=[0]
    )
    again = Stage()
    reader = again.engine(group, ranks=2)
    of_rank_0 = sorted(key for key in stage.store if b":0:0:" in key)
    adopt(again, of_rank_0)
    assert reader.lookup(PROMPT).usable_pages == (10 if replicated else 0)


# Reserve does not wait for the scan after a restart.


def adopt(stage: Stage, keys: list[bytes]) -> int:
    (fingerprint,) = stage.manager.tiers.shared[TIER].group_bytes
    found = stage.manager.tiers.add_scanned(TIER, fingerprint, keys)
    stage.settle()
    return found


@pytest.mark.parametrize("status", [DONE, FAILED])
def test_what_is_written_before_the_scan_finds_it_is_one_row_or_none(status: Any) -> None:
    before = Stage()
    before.engine().save(PROMPT, 0, 10)
    stage = Stage()
    stage.store = set(before.store)
    engine = stage.engine()
    reserved = engine.reserve(PROMPT, *ranges(engine.groups, 0, 4))
    assert reserved.pages[0].pages == (0, 1, 2, 3), "they are there, and nobody knows yet"
    assert adopt(stage, sorted(before.store)) == 6, "those that are being written are left to the writer"
    written = (WrittenPages(0, 4, 4 * PAGE_BYTES),) if status is DONE else ()
    engine.commit(Commit(reserved.ticket, 0, status, written))
    index = stage.manager.tiers.shared[TIER]
    rows = 10 if status is DONE else 6
    assert (len(index.rows), index.quota.num_bytes, len(stage.store)) == (rows, rows * PAGE_BYTES, rows)
    if status is DONE:
        found = engine.lookup(PROMPT)
        assert found.usable_pages == 10 and engine.is_written(found)
        first_page = bytes(index.all_keys()[-1])
        assert first_page.endswith(reserved.pages[0].page_hashes[0]), "heads outlive tails"
    else:
        assert engine.lookup(PROMPT).usable_pages == 0
        assert engine.reserve(PROMPT, *ranges(engine.groups, 0, 10)).pages[0].pages == (0, 1, 2, 3)
