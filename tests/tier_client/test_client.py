"""The client of HostTier on real services: what is fetched is what was saved, and what is away is a miss."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from session.words import TransferStatus
from tests.tier_client.stage import FULL, STATE, Stage, all_pages, path, payload
from tier_client.client import TierClient
from tier_client.large_pages import PART_BYTES
from tier_client.values import Loaded, PageGroup, PagePath, PageRange

PROMPT = path(range(6))
PATIENCE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def check(loaded: Loaded, end: int, *groups: int) -> None:
    """All pages up to `end` came, of FULL groups, and their bytes are those that were saved."""
    assert loaded.usable_pages == end
    for group in groups or (0,):
        pages = loaded.values[group]
        assert all(bytes(value) == payload(group, page) for page, value in pages.items()) and pages
    if end and 0 in loaded.values:
        assert sorted(loaded.values[0]) == list(range(end))


def saved(stage: Stage, client: TierClient, end: int = 6) -> None:
    assert client.save(PROMPT, all_pages(end), payload) == end


def test_a_second_client_fetches_what_the_first_one_saved(shared: Stage) -> None:
    first, second = shared.client(), shared.client()
    before = shared.stats()
    saved(shared, first)
    check(second.fetch(PROMPT), 6)
    stats = shared.stats()
    assert stats.attachments.usable_pages - before.attachments.usable_pages == 6
    assert stats.host_tier.num_fetched_pages - before.host_tier.num_fetched_pages == 6
    assert (stats.attachments.num_leases, stats.attachments.num_tickets) == (0, 0)
    assert second.save(PROMPT, all_pages(6), payload) == 0, "it is all there"
    assert second.fetch(path(range(6), salt="other")).usable_pages == 0


def test_pages_that_the_engine_holds_itself(shared: Stage) -> None:
    client = shared.client()
    saved(shared, client)
    loaded = client.fetch(PROMPT, local_pages=4)
    assert loaded.usable_pages == 6 and sorted(loaded.values[0]) == [4, 5]


def test_tokens_and_states(shared: Stage) -> None:
    client = shared.client(FULL, STATE)
    prompt = PagePath(tokens=list(range(6 * 16)))
    assert client.save(prompt, [PageRange(0, 0, 6), PageRange(1, 3, 4)], payload) == 6
    loaded = client.fetch(prompt)
    check(loaded, 4, 0, 1)
    assert list(loaded.values[1]) == [3]


def test_a_large_page_moves_in_parts(shared: Stage) -> None:
    before = shared.stats().host_tier.num_missing_pages
    large = PageGroup("state", STATE.kind, PART_BYTES + 1_000)
    client = shared.client(FULL, large)
    content = payload(0, 0) * ((PART_BYTES + 1_000) // 256 + 1)
    content = content[: large.page_bytes]
    written = client.save(
        PROMPT, [PageRange(0, 0, 6), PageRange(1, 5, 6)], lambda group, page: content if group else payload(0, page)
    )
    assert written == 6
    loaded = client.fetch(PROMPT)
    assert loaded.usable_pages == 6 and bytes(loaded.values[1][5]) == content
    with shared.redis.client() as redis:
        (key,) = [key for key in redis.keys(b"stemcache:1:*:1:0:*") if redis.type(key) == b"hash"]
        redis.hdel(key, b"1")
    assert client.fetch(PROMPT).usable_pages == 0
    assert shared.stats().host_tier.num_missing_pages == before + 1


def test_what_is_computed_sooner_than_read_is_not_fetched(shared: Stage) -> None:
    """The client measures how fast it reads; before the first read nobody knows."""
    quick, slow = shared.client(compute_tokens_per_s=1e12), shared.client(compute_tokens_per_s=1e-3)
    saved(shared, quick)
    check(quick.fetch(PROMPT), 6)
    before = shared.stats().attachments.misses["fetch_slower"]
    assert quick.fetch(PROMPT).usable_pages == 0
    assert shared.stats().attachments.misses["fetch_slower"] == before + 1
    for _ in range(2):
        check(slow.fetch(PROMPT), 6)


def test_of_a_replicated_group_every_rank_reads_what_the_first_one_wrote(shared: Stage) -> None:
    group = FULL._replace(replicated=True)
    ranks = [shared.client(group, num_ranks=2, rank=rank) for rank in range(2)]
    saved(shared, ranks[0])
    for client in ranks:
        check(client.fetch(PROMPT), 6)


def test_engines_that_cut_pages_otherwise_share_none(shared: Stage) -> None:
    """Pages of one part do not tell the size of parts; larger ones need it."""
    in_parts = [shared.client(part_bytes=size) for size in (64, 128, 64)]
    saved(shared, in_parts[0])
    assert in_parts[1].fetch(PROMPT).usable_pages == 0
    check(in_parts[2].fetch(PROMPT), 6)
    whole = [shared.client(part_bytes=size) for size in (256, 512)]
    assert [client.fetch(PROMPT).usable_pages for client in whole] == [0, 0]
    saved(shared, whole[0])
    check(whole[1].fetch(PROMPT), 6)


def test_a_page_that_vanished_shortens_the_prefix(shared: Stage) -> None:
    before = shared.stats().host_tier.num_missing_pages
    client = shared.client()
    saved(shared, client)
    hit = client.calls.lookup(PROMPT, 0)
    assert hit is not None
    key = hit.pages[0].keys(0)[3]
    client.calls.release(hit, 0, TransferStatus.DONE)
    with shared.redis.client() as redis:
        redis.delete(key)
    check(client.fetch(PROMPT), 3)
    assert shared.stats().host_tier.num_missing_pages == before + 1


@pytest.mark.parametrize("spoil", [lambda v: v[:-1], lambda v: v[:-1] + bytes([v[-1] ^ 1]), lambda v: b"torn", None])
def test_a_torn_page_is_never_used(shared: Stage, spoil: Callable[[bytes], bytes] | None) -> None:
    """`None`: the sound value of another page."""
    before = shared.stats().host_tier.num_corrupt_pages
    client = shared.client()
    saved(shared, client)
    hit = client.calls.lookup(PROMPT, 0)
    assert hit is not None
    keys = hit.pages[0].keys(0)
    with shared.redis.client() as redis:
        value = redis.get(keys[2 if spoil else 4])
        redis.set(keys[2], spoil(value) if spoil else value)
    check(client.fetch(PROMPT), 2)
    assert shared.stats().host_tier.num_corrupt_pages == before + 1


def test_ranks_commit_each_for_itself(shared: Stage) -> None:
    ranks = [shared.client(num_ranks=2, rank=rank) for rank in range(2)]
    asked = ranks[0].calls
    ticket = asked.reserve(PROMPT, all_pages(6))
    assert ticket is not None
    for rank, client in enumerate(ranks):
        pages = ticket.pages[0]
        payloads = [payload(0, page) for page in pages.pages]
        assert client.store.write(0, pages.keys(rank), payloads) == (6, TransferStatus.DONE)
        assert asked.commit(ticket, rank, [(0, 6)], TransferStatus.DONE) == 6 * rank
    hit = asked.lookup(PROMPT, 0)
    assert hit is not None and hit.usable_pages == 6
    read = ranks[1].store.read(0, hit.pages[0].keys(1), FULL.page_bytes)
    assert [bytes(value) for value in read.values] == [payload(0, page) for page in range(6)]


def test_of_a_path_that_is_too_long_the_first_pages_count(shared: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    client = shared.client()
    assert client.calls.attached() is not None
    monkeypatch.setattr(client.calls, "_max_pages", 4)
    assert client.save(PROMPT, all_pages(6), payload) == 4
    check(client.fetch(PROMPT), 4)
    tokens = PagePath(tokens=list(range(6 * 16)))
    assert client.save(tokens, all_pages(6), payload) == 4
    check(client.fetch(tokens), 4)


def test_tokens_that_are_none_find_nothing(shared: Stage) -> None:
    client = shared.client()
    for tokens in ([2**31] * 40, ["a"] * 40):
        assert client.fetch(PagePath(tokens=tokens)) == Loaded(0, {})
        assert client.save(PagePath(tokens=tokens), all_pages(2), payload) == 0
    assert client.fetch(PagePath(page_ids=b"short")) == Loaded(0, {})
    saved(shared, client)


@pytest.mark.parametrize("local_pages", [-1, 2**32, "two"])
def test_local_pages_that_are_no_number_of_pages_find_nothing(shared: Stage, local_pages: Any) -> None:
    assert shared.client().fetch(PROMPT, local_pages) == Loaded(local_pages, {})


@pytest.mark.parametrize("changed", [{"salt": "\ud800"}, {"adapter": 7}, {"page_ids": "text"}, {"tokens": None}])
def test_paths_that_no_request_can_carry_find_nothing(shared: Stage, changed: dict[str, Any]) -> None:
    client, asked = shared.client(), PROMPT._replace(**changed)
    assert client.fetch(asked) == Loaded(0, {})
    assert client.save(asked, all_pages(2), payload) == 0
    saved(shared, client)


@pytest.mark.parametrize("asked", [PageRange(0, -1, 3), PageRange(-1, 0, 3), PageRange(0, "a", 3)])  # type: ignore[arg-type]
def test_ranges_that_no_request_can_carry_write_nothing(shared: Stage, asked: PageRange) -> None:
    client = shared.client()
    assert client.save(PROMPT, [asked], payload) == 0
    saved(shared, client)


def test_pages_of_a_wrong_length_are_not_written(shared: Stage) -> None:
    client = shared.client()
    before = shared.stats().attachments
    assert client.save(PROMPT, all_pages(6), lambda group, page: payload(group, page)[page // 5 :]) == 0
    after = shared.stats().attachments
    assert (after.given_up_pages - before.given_up_pages, after.refused_pages - before.refused_pages) == (6, 0)
    assert client.fetch(PROMPT).usable_pages == 0
    saved(shared, client)


def test_a_save_whose_engine_fails_keeps_nobody_from_writing(shared: Stage) -> None:
    def fail(group: int, page: int) -> bytes:
        raise KeyError(page)

    client = shared.client()
    with pytest.raises(KeyError):
        client.save(PROMPT, all_pages(6), fail)
    saved(shared, client)


def test_tickets_and_leases_are_of_the_attachment_that_gave_them(shared: Stage) -> None:
    """Numbers begin anew with each attachment: what one was told must not end another's."""
    client = shared.client()
    old = client.calls.reserve(PROMPT, all_pages(6))
    with_old = client.calls.attached()
    client.calls._attachment = None
    new = client.calls.reserve(path("new"), all_pages(3))
    assert old is not None and new is not None and old.number == new.number and with_old != client.calls.attached()
    assert client.calls.commit(old, 0, [(0, 0)], TransferStatus.DONE) == 0
    pages = new.pages[0]
    client.store.write(0, pages.keys(0), [payload(0, page) for page in pages.pages])
    assert client.calls.commit(new, 0, [(0, 3)], TransferStatus.DONE) == 3


def test_a_transfer_that_goes_on_for_too_long_has_failed(shared: Stage) -> None:
    """Each command is answered in time, and all of them together are not."""
    client = shared.client()
    many = path(range(40))
    assert client.save(many, all_pages(40), payload) == 40
    ticks = iter(range(1_000))
    client.store._clock = lambda: float(next(ticks))
    client.store._transfer_timeout_s = 2.5
    hit = client.calls.lookup(many, 0)
    assert hit is not None
    read = client.store.read(0, hit.pages[0].keys(0), FULL.page_bytes)
    assert (len(read.values), read.status) == (32, TransferStatus.FAILED)


# What is away.


def nothing(client: TierClient) -> None:
    """Neither call raises, and neither finds or writes anything."""
    assert client.fetch(PROMPT) == Loaded(0, {})
    assert client.fetch(PROMPT, local_pages=2) == Loaded(2, {})
    assert client.save(path("new"), all_pages(3), payload) == 0


def test_nobody_is_there_from_the_start(stage: Stage) -> None:
    stage.cache.kill()
    nothing(stage.client())
    stage.redis.kill()
    nothing(stage.client())


def test_the_service_is_killed_and_comes_back(stage: Stage) -> None:
    client = stage.client()
    saved(stage, client)
    stage.cache.kill()
    nothing(client)
    stage.cache.start()
    until(lambda: client.fetch(PROMPT).usable_pages == 6)
    check(client.fetch(PROMPT), 6)
    assert stage.stats().host_tier.num_spilled_pages == 0, "the scan found the rows"


def test_a_service_that_hangs(stage: Stage) -> None:
    client = stage.client(call_timeout_s=0.2)
    until(lambda: client.save(PROMPT, all_pages(6), payload) == 6 or client.fetch(PROMPT).usable_pages == 6)
    stage.cache.freeze()
    nothing(client)
    stage.cache.thaw()
    until(lambda: client.fetch(PROMPT).usable_pages == 6)


def test_a_commit_of_before_a_restart_is_refused(stage: Stage) -> None:
    client = stage.client()
    ticket = client.calls.reserve(PROMPT, all_pages(6))
    assert ticket is not None and ticket.number
    stage.cache.kill()
    stage.cache.start()
    assert stage.stats().attachments.num_attachments == 0
    assert client.calls.commit(ticket, 0, [(0, 6)], TransferStatus.DONE) is None
    assert client.fetch(PROMPT).usable_pages == 0
    assert stage.stats().host_tier.num_rows == 0


def test_redis_is_killed_and_comes_back_empty(stage: Stage) -> None:
    client = stage.client()
    saved(stage, client)
    stage.redis.kill()
    nothing(client)
    stage.redis.start()
    until(lambda: client.save(PROMPT, all_pages(6), payload) == 6)
    check(client.fetch(PROMPT), 6)


def test_a_full_redis_refuses_pages_and_gives_those_that_it_has(stage: Stage) -> None:
    """A pause would show: it is longer than the test."""
    client, engine_beside = stage.client(pause_s=3_600.0), stage.client(pause_s=3_600.0)
    saved(stage, client)
    with stage.redis.client() as redis:
        redis.config_set("maxmemory", 1)
    for _ in range(2):
        assert client.save(path("new"), all_pages(1), payload) == 0
        check(client.fetch(PROMPT), 6)
    check(engine_beside.fetch(PROMPT), 6)
    # What is gone is looked for in the store that is still the same.
    hit = client.calls.lookup(PROMPT, 0)
    assert hit is not None
    client.calls.release(hit, 0, TransferStatus.DONE)
    with stage.redis.client() as redis:
        redis.delete(hit.pages[0].keys(0)[3])
    check(client.fetch(PROMPT), 3)


def test_redis_is_killed_between_lookup_and_read(stage: Stage) -> None:
    client = stage.client()
    saved(stage, client)
    hit = client.calls.lookup(PROMPT, 0)
    assert hit is not None and hit.usable_pages == 6
    stage.redis.kill()
    read = client.store.read(0, hit.pages[0].keys(0), FULL.page_bytes)
    assert (read.values, read.status) == ([], TransferStatus.FAILED)


def test_after_a_failure_nobody_is_asked_for_a_while(stage: Stage) -> None:
    client = stage.client(pause_s=3_600.0)
    saved(stage, client)
    stage.cache.kill()
    nothing(client)
    stage.cache.start()
    nothing(client)
    assert stage.stats().attachments.num_attachments == 0


def test_a_closed_client_finds_nothing(shared: Stage) -> None:
    client = shared.client()
    saved(shared, client)
    client.close()
    nothing(client)
