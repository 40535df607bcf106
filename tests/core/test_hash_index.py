"""Host rows by themselves: groups, ranks, quota, touches, deletes, the breaker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cache_service.core.base.page_hash import namespace_digest
from cache_service.core.host import cleared_namespaces
from cache_service.core.host.breaker import Breaker
from cache_service.core.host.hash_index import HashIndex
from cache_service.core.host.host_key import HostKey, parse_key
from session.words import MissReason, Namespace, PageHash

FINGERPRINT = b"f" * 32
NS = Namespace("model")


def page(number: int) -> PageHash:
    return PageHash(bytes([number]) * 32)


def make(quota: int = 1000, *, ranks: int = 1, shared: bool = True) -> HashIndex:
    index = HashIndex(quota, Breaker(2, 1000), shared)
    index.group_ranks[FINGERPRINT] = (ranks, ranks)
    index.group_bytes[FINGERPRINT] = (10, 5)
    return index


def hashes_of(keys: Iterable[bytes]) -> list[int]:
    parsed = [parse_key(key) for key in keys]
    return [key.page_hash[0] for key in parsed if key is not None]


def test_a_row_gains_groups_and_counts_each_once() -> None:
    index = make()
    index.add(FINGERPRINT, page(1), 0b01, NS)
    index.add(FINGERPRINT, page(1), 0b11, NS)
    assert index.stored(FINGERPRINT, page(1)) == 0b11 and index.quota.num_bytes == 15


def test_fingerprints_do_not_meet() -> None:
    index = make()
    index.add(FINGERPRINT, page(1), 1, NS)
    assert not index.stored(b"g" * 32, page(1))


def test_the_quota_drops_the_least_recently_used_and_names_their_keys() -> None:
    index = make(quota=20)
    for number in (1, 2, 3):
        index.add(FINGERPRINT, page(number), 1, NS)
    index.shrink()
    assert not index.stored(FINGERPRINT, page(1)) and index.quota.num_bytes == 20
    assert hashes_of(index.take_deletes(9)) == [1] and not index.take_deletes(9)


def test_tails_are_touched_before_heads_so_that_heads_outlive_them() -> None:
    index = make(quota=20)
    for number in (1, 2, 3):
        index.add(FINGERPRINT, page(number), 1, NS)
    index.touch(FINGERPRINT, [page(1), page(2), page(3)])
    assert [key[-1] for key in index.queues.touches] == [3, 2, 1]
    index.shrink()
    assert hashes_of(index.take_deletes(9)) == [3]
    assert hashes_of(index.take_touches(1)) == [2] and hashes_of(index.take_touches(9)) == [1]


def test_what_a_scan_finds_was_used_before_all_that_is_there() -> None:
    index = make(quota=30)
    index.add(FINGERPRINT, page(9), 1, NS)
    for number in (3, 2, 1):  # those used last come first
        assert index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(number)))
    index.shrink()
    assert hashes_of(index.take_deletes(9)) == [1]
    index.add(FINGERPRINT, page(8), 1, NS)
    index.shrink()
    assert hashes_of(index.take_deletes(9)) == [2]


def test_a_key_that_is_written_anew_is_not_deleted() -> None:
    index = make()
    for number in (1, 2, 3):
        index.add(FINGERPRINT, page(number), 0b11, NS)
        index.forget(FINGERPRINT, page(number), MissReason.LOST)
    index.add(FINGERPRINT, page(1), 0b01, NS)
    index.begin(FINGERPRINT, page(2), 0b11)
    deleted = [parse_key(name) for name in index.take_deletes(9)]
    assert [(key.page_hash[0], key.group) for key in deleted if key] == [(1, 1), (3, 0), (3, 1)]


def test_a_private_tier_has_no_keys_to_delete_or_touch() -> None:
    index = make(quota=0, shared=False)
    index.add(FINGERPRINT, page(1), 1, NS)
    index.touch(FINGERPRINT, [page(1)])
    index.shrink()
    assert not index.rows and not index.queues


def test_a_scanned_row_is_visible_when_every_rank_was_seen() -> None:
    index = make(ranks=2)
    assert not index.add_scanned(HostKey(FINGERPRINT, 0, 1, page(1)))
    assert not index.add_scanned(HostKey(FINGERPRINT, 0, 1, page(1)))
    assert not index.stored(FINGERPRINT, page(1))
    assert index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(1)))
    assert index.stored(FINGERPRINT, page(1)) == 1 and index.quota.num_bytes == 20
    assert not index.add_scanned(HostKey(FINGERPRINT, 7, 0, page(2))), "a group that nobody declared"
    index.forget(FINGERPRINT, page(1), MissReason.LOST)
    assert len(index.take_deletes(9)) == 2, "one key for each rank"


def test_what_was_cleared_is_hidden_at_once_and_dropped_bit_by_bit() -> None:
    other = Namespace("model", salt="other")
    index = make()
    index.add(FINGERPRINT, page(1), 1, NS)
    index.add(FINGERPRINT, page(2), 1, other)
    index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(3)))
    floor = index.hide(namespace_digest(NS))
    assert index.cleared.floor(namespace_digest(NS)) == floor and index.cleared.floor(namespace_digest(other)) < 0
    assert not index.leading(FINGERPRINT, [page(1)], 1, floor) and not index.leading(FINGERPRINT, [page(3)], 1, floor)
    assert index.leading(FINGERPRINT, [page(3), page(2)], 1, index.cleared.floor(namespace_digest(other))) == 2
    assert not index.known(FINGERPRINT, page(3), floor), "its own page may be written anew"
    dropped = [number for number in (1, 2, 3) if index.drop_hidden(FINGERPRINT + page(number), NS, floor)]
    assert dropped == [1]
    index.add(FINGERPRINT, page(3), 1, NS)
    assert index.leading(FINGERPRINT, [page(3)], 1, floor) == 1


def test_a_scan_after_a_clear_of_all_deletes_what_it_finds() -> None:
    index = make()
    index.add(FINGERPRINT, page(1), 1, NS)
    index.hide(None)
    assert index.drop_hidden(FINGERPRINT + page(1), None, index.cleared.floor(b""))
    index.add(FINGERPRINT, page(2), 1, NS)
    assert not index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(3)))
    assert not index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(2)))
    assert hashes_of(index.take_deletes(9)) == [1, 3]
    index.lose()
    assert index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(3)))


def test_namespaces_that_are_forgotten_take_what_they_could_still_find(monkeypatch: Any) -> None:
    monkeypatch.setattr(cleared_namespaces, "MAX_CLEARED", 2)
    index = make()
    index.add_scanned(HostKey(FINGERPRINT, 0, 0, page(3)))
    for number in range(3):
        index.hide(bytes([number]) * 32)
    assert not index.rows


def test_the_breaker_opens_closes_and_opens_faster_again() -> None:
    index = make()
    index.breaker.failed(0)
    assert not index.breaker.is_open
    index.breaker.failed(0)
    assert index.breaker.is_open
    index.breaker.tick(999)
    assert index.breaker.is_open
    index.breaker.tick(1000)
    assert not index.breaker.is_open
    index.breaker.failed(1000)
    assert index.breaker.is_open
    index.breaker.succeeded()
    index.breaker.failed(1000)
    assert not index.breaker.is_open


def test_what_is_on_its_way_is_known_but_not_fetched() -> None:
    index = make()
    index.begin(FINGERPRINT, page(1), 0b11)
    assert index.known(FINGERPRINT, page(1)) == 0b11 and not index.stored(FINGERPRINT, page(1))
    index.end(FINGERPRINT, page(1), 0b01)
    assert index.known(FINGERPRINT, page(1)) == 0b10
    index.end(FINGERPRINT, page(1), 0b10)
    assert not index.pending
