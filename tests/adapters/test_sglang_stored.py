"""What SGLang's storage threads ask of the host tier: pages of each kind, and where a prefix of all kinds can end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from adapters.sglang.pool_hits import pool_hits
from adapters.sglang.stored_pages import StoredPages
from session.words import GroupKind
from tests.tier_client.conftest import common_stage, shared, stage
from tests.tier_client.stage import Stage
from tests.tier_client.test_client import until
from tier_client.values import PageGroup

__all__ = ["common_stage", "shared", "stage"]

PAGE_TOKENS, WINDOW, PAGE_BYTES = 4, 7, 64  # of a window before a token: a boundary needs two pages


def ids(count: int, text: str = "") -> list[bytes]:
    return [hashlib.sha256(f"stored {text} {page}".encode()).digest() for page in range(count)]


@contextmanager
def stored(stage: Stage, group: PageGroup) -> Iterator[StoredPages]:
    with stage.client(group, page_tokens=PAGE_TOKENS) as client:
        yield StoredPages(client)


@pytest.fixture
def stored_tokens(shared: Stage) -> Iterator[StoredPages]:
    with stored(shared, PageGroup("kv", GroupKind.FULL, PAGE_BYTES)) as pages:
        yield pages


def pages_of(count: int) -> list[bytes]:
    return [bytes([page]) * PAGE_BYTES for page in range(count)]


def test_stored_pages_are_present_and_read_up_to_the_first_that_is_not(
    stored_tokens: StoredPages, shared: Stage
) -> None:
    before = shared.stats().attachments.num_leases
    names, pages = ids(4, "tokens"), pages_of(4)
    assert stored_tokens.num_present(names) == 0 and stored_tokens.read(names) == []
    assert stored_tokens.write(names[:3], pages[:3])
    assert stored_tokens.write(names[:2], pages[:2]), "they are there already"
    assert stored_tokens.num_present(names) == 3
    assert [bytes(page) for page in stored_tokens.read(names[:3])] == pages[:3]
    assert [bytes(page) for page in stored_tokens.read(names)] == pages[:3], "asked for without a question before"
    assert stored_tokens.num_present(names[1:]) == 2, "a chain may begin anywhere"
    assert [bytes(page) for page in stored_tokens.read(names[1:2])] == pages[1:2]
    assert shared.stats().attachments.num_leases == before


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_page_that_is_not_as_it_was_written_ends_what_is_read(shared: Stage, damage: str) -> None:
    with stored(shared, PageGroup("kv", GroupKind.FULL, PAGE_BYTES)) as kept:
        names, pages = ids(4, damage), pages_of(4)
        before = keys(shared)
        assert kept.write(names[:1], pages[:1])
        (first,) = keys(shared) - before
        assert kept.write(names, pages)
        with shared.redis.client() as redis:
            value = redis.get(first)
            assert isinstance(value, bytes)
            redis.delete(first)
            if damage == "torn":
                redis.set(first, value[:-1] + bytes([value[-1] ^ 1]))
        assert kept.read(names) == [], "a wrong page"
        assert kept.num_present(names) == 0, "its row is gone"
        assert kept.write(names, pages)
        assert [bytes(page) for page in kept.read(names)] == pages


def keys(stage: Stage) -> set[bytes]:
    with stage.redis.client() as redis:
        return set(redis.keys("*"))


@pytest.mark.parametrize("dead", ["redis", "cache"])
def test_with_redis_or_the_service_dead_nothing_is_there_and_nothing_is_raised(stage: Stage, dead: str) -> None:
    with stored(stage, PageGroup("kv", GroupKind.FULL, PAGE_BYTES)) as kept:
        names, pages = ids(3), pages_of(3)
        assert kept.write(names, pages) and kept.num_present(names) == 3
        service = stage.redis if dead == "redis" else stage.cache
        service.kill()
        # What was granted before is read, if the bytes are there.
        assert [bytes(page) for page in kept.read(names[:2])] == ([] if dead == "redis" else pages[:2])
        assert kept.num_present(names) == 0 and kept.read(names) == [] and not kept.write(ids(3, "other"), pages)
        service.start()
        until(lambda: kept.write(names, pages) and [bytes(page) for page in kept.read(names)] == pages)


def test_paths_that_begin_alike_are_told_apart(stored_tokens: StoredPages) -> None:
    """SGLang asks for the pages of one request and reads those of another before it: both begin with one system
    prompt, whose page says nothing of what comes behind it."""
    first, second, pages = ids(3, "system"), ids(3, "other"), pages_of(5)
    second[0] = first[0]
    assert stored_tokens.write(first, pages[:3]) and stored_tokens.write(second, [pages[0], *pages[3:]])
    assert stored_tokens.num_present(first) == stored_tokens.num_present(second) == 3
    assert [bytes(page) for page in stored_tokens.read(first)] == pages[:3]
    assert [bytes(page) for page in stored_tokens.read(second)] == [pages[0], *pages[3:]]


def test_answers_that_nobody_uses_give_their_leases_back(
    stored_tokens: StoredPages, shared: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.sglang.stored_pages.MAX_HITS", 2)
    before = shared.stats().attachments.num_leases
    names = ids(4, "unused")
    assert stored_tokens.write(names, pages_of(4))
    for first in range(4):
        assert stored_tokens.num_present(names[first:]) == 4 - first
    assert stored_tokens.num_present(names[3:]) == 1
    assert shared.stats().attachments.num_leases == before + 2


def test_stored_windows_and_states_are_read_from_their_end(shared: Stage) -> None:
    before, names = shared.stats().attachments.num_leases, ids(6, "stored")
    window, pages = PageGroup("swa", GroupKind.WINDOW, 64, WINDOW + 1), [bytes([page]) * 64 for page in range(6)]
    with stored(shared, window) as windows, stored(shared, PageGroup("mamba", GroupKind.STATE, 64)) as states:
        assert windows.write(names[1:4], pages[1:4]) and states.write(names[2:3], pages[2:3])
        assert (windows.num_present(names), states.num_present(names)) == (4, 3)
        assert [bytes(page) for page in windows.read(names[2:4])] == pages[2:4]
        assert [bytes(page) for page in states.read(names[2:3])] == pages[2:3]
        assert windows.num_present(names[:2]) == 0, "its first page is missing"
        assert windows.read(names[1:4]) == states.read(names[1:3]) == [], "more pages than are read for a boundary"
        assert windows.read(names[4:6]) == states.read(names[5:6]) == []
        assert [bytes(page) for page in windows.read(names[1:3])] == pages[1:3], "asked for without a question before"
        found = pool_hits("kv", {"kv": Everything(), "swa": windows, "mamba": states}, names)
        assert (found.usable, found.by_pool) == (3, {"kv": 6, "swa": 3, "mamba": 3})
        assert windows.read(names[1:3]) and states.read(names[2:3])
    assert shared.stats().attachments.num_leases <= before + 1


class Everything:
    def num_present(self, ids: Sequence[bytes]) -> int:
        return len(ids)


class Scripted:
    """A pool whose prefixes can end at these pages."""

    def __init__(self, *ends: int) -> None:
        self._ends = ends

    def num_present(self, ids: Sequence[bytes]) -> int:
        return max([end for end in self._ends if end <= len(ids)], default=0)


@pytest.mark.parametrize(
    ("swa", "mamba", "usable"),
    [((8, 5), (8, 5), 8), ((8, 5), (7, 5), 5), ((8, 3), (7, 2), 0), ((), (8,), 0), ((6, 4, 2), (5, 3, 2), 2)],
)
def test_pools_agree_on_the_last_boundary_of_all(swa: tuple[int, ...], mamba: tuple[int, ...], usable: int) -> None:
    pools = {"kv": Everything(), "swa": Scripted(*swa), "mamba": Scripted(*mamba)}
    assert pool_hits("kv", pools, ids(8)).usable == usable
