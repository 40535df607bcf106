"""What every host tier owes its callers, whatever is inside."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from session.words import HostTierKind
from tests.contract.conftest import Store
from tier_client.errors import HostTierError

MIB = 1 << 20
LIMIT = 4 * MIB


def page(seed: int, size: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(size)


def test_a_value_comes_back_bit_for_bit(store: Store) -> None:
    value = page(1, 2 * MIB + 13)
    assert store.tier.put([b"k"], [[value]]) == 1
    found = store.tier.get([b"k"], LIMIT)
    assert isinstance(found[0], bytearray)
    assert found == [value]


def test_a_value_is_its_parts_in_order(store: Store) -> None:
    body = page(2)
    parts = [b"header", memoryview(body)[:1000], b"", memoryview(body)[1000:]]
    assert store.tier.put([b"k"], [parts]) == 1
    assert store.tier.get([b"k"], LIMIT) == [b"header" + body]


def test_parts_may_be_views_of_wider_items(store: Store) -> None:
    body = page(3, 4096)
    assert store.tier.put([b"k"], [[b"h", memoryview(bytearray(body)).cast("i")]]) == 1
    assert store.tier.get([b"k"], LIMIT) == [b"h" + body]


def test_what_comes_back_belongs_to_the_caller(store: Store) -> None:
    value = page(4, 1000)
    store.tier.put([b"k"], [[value]])
    first = store.tier.get([b"k"], LIMIT)[0]
    assert first is not None
    first[:] = bytes(1000)
    assert store.tier.get([b"k"], LIMIT) == [value]


def test_what_went_in_may_change_afterwards(store: Store) -> None:
    body = bytearray(page(5))
    store.tier.put([b"k"], [[memoryview(body)]])
    body[:] = bytes(len(body))
    assert store.tier.get([b"k"], LIMIT) == [page(5)]


def test_absent_keys_are_none_in_their_place(store: Store) -> None:
    store.tier.put([b"a", b"c"], [[page(6)], [page(7)]])
    assert store.tier.get([b"x", b"a", b"b", b"c"], LIMIT) == [None, page(6), None, page(7)]


def test_a_later_put_replaces_the_value(store: Store) -> None:
    store.tier.put([b"k"], [[page(8)]])
    store.tier.put([b"k"], [[page(9, 17)]])
    assert store.tier.get([b"k"], LIMIT) == [page(9, 17)]


def test_nothing_asked_nothing_answered(store: Store) -> None:
    assert store.tier.put([], []) == 0
    assert store.tier.get([], LIMIT) == []


def test_an_empty_value_is_not_absent(store: Store) -> None:
    assert store.tier.put([b"e"], [[]]) == 1
    assert store.tier.get([b"e", b"f"], LIMIT) == [b"", None]


def test_as_many_keys_as_values(store: Store) -> None:
    with pytest.raises(ValueError, match="2 keys for 1 values"):
        store.tier.put([b"a", b"b"], [[b"1"]])
    assert store.tier.get([b"a"], LIMIT) == [None]


def test_a_value_beyond_the_limit_is_as_good_as_absent(store: Store) -> None:
    values = {b"%d" % i: page(i, 5000 if i in (2, 5) else 1000) for i in range(10)}
    store.tier.put(list(values), [[value] for value in values.values()])
    found = store.tier.get(list(values), 1000)
    assert found == [None if len(value) > 1000 else value for value in values.values()]


def test_the_limit_itself_is_allowed(store: Store) -> None:
    store.tier.put([b"k"], [[page(1, 1000)]])
    assert store.tier.get([b"k"], 1000) == [page(1, 1000)]


def test_more_values_than_one_command_takes(store: Store) -> None:
    keys = [b"k%d" % i for i in range(21)]
    assert store.tier.put(keys, [[b"h", page(i, 1000 + i)] for i in range(21)]) == 21
    assert store.tier.get(keys, LIMIT) == [b"h" + page(i, 1000 + i) for i in range(21)]


def test_keys_are_any_bytes(store: Store) -> None:
    keys = [b"with space", b"\r\n$3\r\n", bytes(range(256)), b"stemcache:1:" + b"f" * 64]
    assert store.tier.put(keys, [[key[::-1]] for key in keys]) == len(keys)
    assert store.tier.get(keys, LIMIT) == [key[::-1] for key in keys]


def test_values_may_look_like_replies(store: Store) -> None:
    value = b"-ERR no\r\n$5\r\nabc\r\n+OK\r\n$-1\r\n"
    store.tier.put([b"a", b"b"], [[value], [b"\r\n"]])
    assert store.tier.get([b"a", b"b"], LIMIT) == [value, b"\r\n"]


def test_a_full_store_acknowledges_the_leading_ones(store: Store) -> None:
    store.shrink(8 * MIB)
    values = [[page(i, MIB)] for i in range(3)] + [[bytes(16 * MIB)], [bytes(16 * MIB)]]
    keys = [b"k%d" % i for i in range(len(values))]
    stored = store.tier.put(keys, values)
    assert 3 <= stored < 5
    assert store.tier.get(keys[:3], LIMIT) == [page(i, MIB) for i in range(3)]
    assert store.tier.get([b"k4"], LIMIT) == [None]


PARTS = [[b"head", b"er"], [b"body" * 1000], [b"x"]]


def read_parts(store: Store, key: bytes, num_parts: int, limit: int = LIMIT) -> list[bytearray | None]:
    return list(store.tier.get_parts(key, num_parts, limit))


def test_a_value_in_parts_comes_back_part_by_part(store: Store) -> None:
    assert store.tier.put_parts(b"k", iter(PARTS))
    assert read_parts(store, b"k", 3) == [b"header", b"body" * 1000, b"x"]
    assert store.tier.get([b"k"], LIMIT) == [None], "it is no whole value"


def test_large_parts(store: Store) -> None:
    parts = [page(seed, MIB + seed) for seed in range(7)]
    assert store.tier.put_parts(b"k", ([b"h", memoryview(part)] for part in parts))
    assert read_parts(store, b"k", 7) == [b"h" + part for part in parts]


def test_a_value_that_lacks_parts_ends_with_none(store: Store) -> None:
    store.tier.put([b"whole"], [[b"v"]])
    store.tier.put_parts(b"k", PARTS[:2])
    assert read_parts(store, b"absent", 3) == read_parts(store, b"whole", 3) == [None]
    assert read_parts(store, b"k", 5) == [b"header", b"body" * 1000, None]


def test_a_part_beyond_the_limit_is_as_good_as_absent(store: Store) -> None:
    store.tier.put_parts(b"k", PARTS)
    assert read_parts(store, b"k", 3, 3999) == [b"header", None]
    assert read_parts(store, b"k", 3, 4000) == [b"header", b"body" * 1000, b"x"]


def test_parts_are_read_as_they_are_taken(store: Store) -> None:
    store.tier.put_parts(b"k", PARTS)
    parts = store.tier.get_parts(b"k", 3, LIMIT)
    assert next(parts) == b"header"
    parts.close()
    assert read_parts(store, b"k", 3)[2] == b"x"


def test_nobody_finds_a_value_before_its_last_part(store: Store) -> None:
    def looked_at() -> Iterator[list[bytes]]:
        for number in range(4):
            assert read_parts(store, b"k", 1) == [old]
            yield [b"new %d" % number]

    old: bytes | None = None
    store.tier.put_parts(b"k", looked_at())
    old = b"new 0"
    store.tier.put_parts(b"k", looked_at())
    assert read_parts(store, b"k", 4)[3] == b"new 3"


def test_a_writing_that_ends_half_way_changes_nothing(store: Store) -> None:
    def broken() -> Iterator[list[bytes]]:
        yield [b"new"]
        raise ZeroDivisionError

    store.tier.put_parts(b"k", PARTS)
    with pytest.raises(ZeroDivisionError):
        store.tier.put_parts(b"k", broken())
    assert read_parts(store, b"k", 3) == [b"header", b"body" * 1000, b"x"]


def test_a_whole_value_replaces_parts_and_parts_a_whole_one(store: Store) -> None:
    store.tier.put([b"k"], [[b"v"]])
    store.tier.put_parts(b"k", PARTS)
    assert read_parts(store, b"k", 1) == [b"header"]
    store.tier.put([b"k"], [[b"w"]])
    assert (read_parts(store, b"k", 1), store.tier.get([b"k"], LIMIT)) == ([None], [b"w"])


def test_a_store_that_gets_full_between_parts_keeps_none_of_them(store: Store) -> None:
    store.shrink(8 * MIB)
    assert not store.tier.put_parts(b"k", ([bytes(4 * MIB)] for _ in range(8)))
    assert read_parts(store, b"k", 1) == [None]
    assert store.tier.put([b"small"], [[b"v"]]) == 1, "what was stored of it is gone"


def test_many_threads_at_once(store: Store) -> None:
    def worker(seed: int) -> bool:
        rng = random.Random(seed)
        for turn in range(12):
            keys = [b"%d:%d:%d" % (seed, turn, i) for i in range(rng.randint(1, 8))]
            values = [rng.randbytes(rng.randint(0, 200_000)) for _ in keys]
            if store.tier.put(keys, [[value] for value in values]) != len(keys):
                return False
            if store.tier.get([*keys, b"absent"], LIMIT) != [*values, None]:
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(worker, range(6)))


def test_the_identity_stays_until_a_flush(store: Store) -> None:
    first = store.tier.identity()
    assert first
    assert store.tier.identity() == first
    store.tier.put([b"k"], [[b"v"]])
    store.flush()
    assert store.tier.get([b"k"], LIMIT) == [None]
    assert store.tier.identity() not in ("", first)
    assert store.tier.put([b"k"], [[b"w"]]) == 1
    assert store.tier.get([b"k"], LIMIT) == [b"w"]


def test_every_tier_names_its_kind(store: Store) -> None:
    assert store.tier.kind in (HostTierKind.PRIVATE, HostTierKind.SHARED)


def test_a_closed_tier_says_so(store: Store) -> None:
    store.tier.put([b"k"], [[b"v"]])
    store.tier.close()
    with pytest.raises(HostTierError, match="closed"):
        store.tier.get([b"k"], LIMIT)
    with pytest.raises(HostTierError, match="closed"):
        store.tier.put([b"k"], [[b"v"]])
    with pytest.raises(HostTierError, match="closed"):
        store.tier.put_parts(b"k", PARTS)
    with pytest.raises(HostTierError, match="closed"):
        read_parts(store, b"k", 1)
