"""Redis URLs: what they may say, and that no error repeats a password."""

from __future__ import annotations

import pytest

from session.redis_url import RedisAddress, RedisUrlError, parse_redis_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost", RedisAddress(host="localhost", port=6379)),
        ("redis://10.0.0.7:7000/5", RedisAddress(host="10.0.0.7", port=7000, database=5)),
        ("redis://:p%40ss%2F@h/", RedisAddress(host="h", port=6379, password="p@ss/")),
        ("redis://u:p@h:1/2", RedisAddress(host="h", port=1, username="u", password="p", database=2)),
        ("redis://[::1]:7000", RedisAddress(host="::1", port=7000)),
        ("rediss://h", RedisAddress(host="h", port=6379, tls=True)),
        ("unix:///run/r.sock", RedisAddress(unix_path="/run/r.sock")),
        ("unix://:p@/run/r.sock?db=4", RedisAddress(unix_path="/run/r.sock", password="p", database=4)),
    ],
)
def test_what_urls_name(url: str, address: RedisAddress) -> None:
    assert parse_redis_url(url) == address


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "must start"),
        ("localhost:6379", "must start"),
        ("http://:secret@h", "must start"),
        ("redis://", "host is missing"),
        ("redis://:secret@:6379", "host is missing"),
        ("redis://:secret@h:0", "port 0"),
        ("redis://:secret@h:70000", "port"),
        ("redis://:secret@h:abc", "port"),
        ("redis://:sec:ret/x@h", "port"),
        ("redis://:secret@h/one", "database"),
        ("redis://:secret@h/-1", "database"),
        ("redis://:secret@h/0?timeout=3", "options"),
        ("redis://:sec#ret@h", "port|'#'"),
        ("redis://:secret@[::1", "cannot be parsed"),
        ("unix://", "path"),
        ("unix:///s?db=x", "database"),
        ("unix:///s?user=x", "unknown option"),
        ("unix:///s?secret", "unknown option"),
        ("secret://h", "must start with redis://"),
        # An unescaped "/" in a password: what stands before it is read as a host with a port.
        ("redis://user:12/secret@h:6379/0", "database is a number; a '/' in a password must be written as %2F"),
        ("redis://:12/secret@h:6379/0", "host is missing"),
        ("unix://user:12/secret@/run/r.sock", "no host"),
        ("unix://run/r.sock", "no host"),
    ],
)
def test_what_urls_must_not_say(url: str, reason: str) -> None:
    with pytest.raises(RedisUrlError, match=reason) as caught:
        parse_redis_url(url)
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_texts_hide_the_password() -> None:
    address = parse_redis_url("redis://user:secret@h:1/2")
    assert str(address) == "redis://user@h:1/2"
    assert "secret" not in repr(address)
    assert str(parse_redis_url("unix://:secret@/run/r.sock")) == "unix:///run/r.sock?db=0"
