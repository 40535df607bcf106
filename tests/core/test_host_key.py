"""Keys of the host tier: readable, and parsed back only in the spelling that was built."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.core.host.host_key import HostKey, build_key, parse_key, scan_prefix
from session.words import PageHash


def test_reads_as_fingerprint_group_rank_hash() -> None:
    key = HostKey(b"\x01\x02", 3, 4, PageHash(bytes(32)))
    assert build_key(key) == b"stemcache:1:0102:3:4:" + b"0" * 64
    assert build_key(key).startswith(scan_prefix(b"\x01\x02"))


@given(
    st.binary(min_size=1, max_size=32), st.integers(0, 31), st.integers(0, 1023), st.binary(min_size=32, max_size=32)
)
def test_there_and_back(fingerprint: bytes, group: int, rank: int, page_hash: bytes) -> None:
    key = HostKey(fingerprint, group, rank, PageHash(page_hash))
    assert parse_key(build_key(key)) == key


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"stemcache:2:01:0:0:" + b"0" * 64,
        b"stemcache:1:01:0:0",
        b"stemcache:1:01:0:0:" + b"0" * 62,
        b"stemcache:1:01:0:0:" + b"g" * 64,
        b"stemcache:1:01:+0:0:" + b"0" * 64,
        b"stemcache:1:01: 0:0:" + b"0" * 64,
        b"stemcache:1:AB:0:0:" + b"0" * 64,
        b"stemcache:1:01:-1:0:" + b"0" * 64,
        b"stemcache:1:01:0:-1:" + b"0" * 64,
        b"stemcache:1:01:32:0:" + b"0" * 64,
        b"stemcache:1:01:0:1024:" + b"0" * 64,
        b"stemcache:1:01:0:" + b"9" * 5000 + b":" + b"0" * 64,
        b"stemcache:1:\xff:0:0:" + b"0" * 64,
    ],
)
def test_a_foreign_key_is_none(raw: bytes) -> None:
    assert parse_key(raw) is None
