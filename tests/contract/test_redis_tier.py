"""What the Redis tier adds to the contract: connections, their death, and the server's bad days."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_service.core.host.host_key import parse_key
from session.protocol import MAX_SENTINEL_BYTES, SENTINEL_KEY
from tests.contract.scripted_server import ScriptedServer
from tests.redis_process import RedisProcess, find_redis_binary, free_port
from tier_client.errors import HostTierError
from tier_client.redis_parts import UNFINISHED_MS
from tier_client.redis_tier import RedisTier, RedisTierConfig

LIMIT = 1 << 20
QUICK = RedisTierConfig(num_connections=1, timeout_s=0.3)


def test_after_a_kill_an_error_and_after_a_restart_service(redis: RedisProcess) -> None:
    tier = RedisTier(redis.url, RedisTierConfig(timeout_s=2.0))
    first = tier.identity()
    assert tier.put([b"k"], [[b"v"]]) == 1
    redis.kill()
    with pytest.raises(HostTierError, match="cannot connect"):
        tier.get([b"k"], LIMIT)
    redis.start()
    assert tier.get([b"k"], LIMIT) == [None]
    assert tier.put([b"k"], [[b"w"]]) == 1
    assert tier.get([b"k"], LIMIT) == [b"w"]
    assert tier.identity() != first
    tier.close()


def test_a_restart_between_two_calls_goes_unnoticed(redis: RedisProcess) -> None:
    tier = RedisTier(redis.url)
    tier.put([b"k"], [[b"v"]])
    redis.kill()
    redis.start()
    assert tier.get([b"k"], LIMIT) == [None]
    tier.close()


def test_several_workers_learn_one_identity(redis: RedisProcess) -> None:
    tiers = [RedisTier(redis.url) for _ in range(4)]
    names: list[str] = []
    threads = [threading.Thread(target=lambda tier=tier: names.append(tier.identity())) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 4
    assert len(set(names)) == 1
    with redis.client() as client:
        assert client.get(SENTINEL_KEY) == names[0].encode()
        assert client.ttl(SENTINEL_KEY) == -1
    for tier in tiers:
        tier.close()


def test_a_full_store_says_who_it_is(redis: RedisProcess) -> None:
    first, second = RedisTier(redis.url), RedisTier(redis.url)
    name = first.identity()
    with redis.client() as client:
        client.config_set("maxmemory", 1)
    assert first.identity() == second.identity() == name
    assert first.put([b"k"], [[b"v"]]) == 0
    first.close()
    second.close()


@pytest.mark.parametrize("value", [b"", b"x" * (MAX_SENTINEL_BYTES + 1)])
def test_a_foreign_sentinel_is_an_error_and_stays(redis: RedisProcess, value: bytes) -> None:
    tier = RedisTier(redis.url)
    with redis.client() as client:
        client.set(SENTINEL_KEY, value)
        with pytest.raises(HostTierError, match="foreign value"):
            tier.identity()
        assert client.get(SENTINEL_KEY) == value
    tier.close()


def test_values_end_by_themselves(redis: RedisProcess) -> None:
    tier = RedisTier(redis.url, RedisTierConfig(ttl_ms=60_000))
    tier.put([b"k"], [[b"v"]])
    with redis.client() as client:
        assert 50_000 < client.pttl(b"k") <= 60_000
    tier.close()


def test_a_key_of_another_type_is_as_good_as_absent(redis: RedisProcess) -> None:
    tier = RedisTier(redis.url)
    with redis.client() as client:
        client.rpush(b"list", b"item")
    tier.put([b"k"], [[b"v"]])
    assert tier.get([b"list", b"k"], LIMIT) == [None, b"v"]
    tier.close()


def test_database_and_user_are_taken_from_the_url(redis: RedisProcess) -> None:
    tier = RedisTier(f"redis://default:{redis.password}@127.0.0.1:{redis.port}/3")
    tier.put([b"k"], [[b"v"]])
    other = RedisTier(redis.url)
    assert other.get([b"k"], LIMIT) == [None]
    assert tier.get([b"k"], LIMIT) == [b"v"]
    tier.close()
    other.close()


def test_unix_sockets(tmp_path: Path) -> None:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server")
    path = tmp_path / "r.sock"
    with RedisProcess(binary, unix_socket=path) as server:
        tier = RedisTier(f"unix://:{server.password}@{path}?db=1")
        assert tier.put([b"k"], [[b"v" * 500_000]]) == 1
        assert tier.get([b"k"], LIMIT) == [b"v" * 500_000]
        tier.close()


@pytest.mark.parametrize("password", ["wrong-secret", ""])
def test_a_wrong_password_is_a_clear_error_without_the_password(redis: RedisProcess, password: str) -> None:
    tier = RedisTier(f"redis://:{password}@127.0.0.1:{redis.port}/0")
    with pytest.raises(HostTierError, match=r"NOAUTH|WRONGPASS|invalid") as caught:
        tier.put([b"k"], [[b"v"]])
    assert "wrong-secret" not in f"{caught.value}{caught.value.__cause__}{tier!r}"
    tier.close()


def test_the_password_stays_out_of_texts(redis: RedisProcess) -> None:
    tier = RedisTier(redis.url)
    assert redis.password not in f"{tier!r} {tier._address!r} {tier._address}"
    redis.kill()
    with pytest.raises(HostTierError) as caught:
        tier.identity()
    assert redis.password not in f"{caught.value}{caught.value.__cause__}"


def test_nobody_there() -> None:
    tier = RedisTier(f"redis://127.0.0.1:{free_port()}", QUICK)
    with pytest.raises(HostTierError, match=r"cannot connect to redis://127\.0\.0\.1:\d+/0"):
        tier.identity()


def test_a_stalled_server_is_an_error_in_time(redis_server: RedisProcess) -> None:
    tier = RedisTier(redis_server.url, QUICK)
    tier.put([b"k"], [[b"v"]])
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(HostTierError, match="no reply in time"):
            tier.get([b"k"], LIMIT)
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert tier.get([b"k"], LIMIT) == [b"v"]
    tier.close()


def test_a_half_read_connection_is_never_used_again() -> None:
    # The value is cut off; its rest must not be taken for the reply of the next command.
    scripts = [[b"$10\r\nabcde"], [b"$2\r\nok\r\n"]]
    with ScriptedServer(scripts) as server:
        tier = RedisTier(f"redis://{server.address}", QUICK)
        with pytest.raises(HostTierError, match="no reply in time"):
            tier.get([b"k"], LIMIT)
        assert tier.get([b"k"], LIMIT) == [b"ok"]
        assert server.num_connections == 2
        tier.close()


def test_a_late_reply_is_never_taken_for_the_next_one() -> None:
    # More comes than was asked for: the idle connection holds unread bytes and must be dropped.
    scripts = [[b"$1\r\na\r\n$5\r\nwrong\r\n"], [b"$1\r\nb\r\n"]]
    with ScriptedServer(scripts) as server:
        tier = RedisTier(f"redis://{server.address}", QUICK)
        assert tier.get([b"k"], LIMIT) == [b"a"]
        assert tier.get([b"k"], LIMIT) == [b"b"]
        tier.close()


def test_a_too_long_value_costs_its_connection_only() -> None:
    scripts = [[b"$1\r\na\r\n$999999999\r\nxxxx"], [b"$1\r\nc\r\n"]]
    with ScriptedServer(scripts) as server:
        tier = RedisTier(f"redis://{server.address}", QUICK)
        assert tier.get([b"1", b"2", b"3"], 10) == [b"a", None, b"c"]
        tier.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"*1\r\n$1\r\na\r\n",
        b"$x\r\n",
        b"$-x\r\n",
        b"hello\r\n",
        b"$1\r\nabc",
        b"-LOADING still loading\r\n",
        b"y" * 9000,
    ],
    ids=["array", "length", "minus", "no type", "no end", "error", "endless line"],
)
def test_nonsense_is_an_error_and_costs_the_connection(reply: bytes) -> None:
    with ScriptedServer([[reply], [b"$1\r\nb\r\n"]]) as server:
        tier = RedisTier(f"redis://{server.address}", QUICK)
        with pytest.raises(HostTierError):
            tier.get([b"k"], LIMIT)
        assert tier.get([b"k"], LIMIT) == [b"b"]
        tier.close()


def test_a_server_that_hangs_up_is_an_error() -> None:
    with ScriptedServer([[b"$10\r\nabc"]], hold_open=False) as server:
        tier = RedisTier(f"redis://{server.address}", QUICK)
        with pytest.raises(HostTierError, match="closed the connection"):
            tier.get([b"k"], LIMIT)
        tier.close()


def test_another_error_than_full_is_raised() -> None:
    with ScriptedServer([[b"+OK\r\n-MISCONF disk\r\n"]]) as server:
        tier = RedisTier(f"redis://{server.address}", QUICK)
        with pytest.raises(HostTierError, match="MISCONF"):
            tier.put([b"a", b"b"], [[b"1"], [b"2"]])
        tier.close()


def test_a_reply_in_small_pieces() -> None:
    value = os.urandom(9000)
    wire = b"$9000\r\n" + value + b"\r\n"
    with ScriptedServer([[wire[:3]], [b""]], hold_open=True) as server:
        tier = RedisTier(f"redis://{server.address}", RedisTierConfig(num_connections=1, timeout_s=5.0))

        def rest() -> None:
            while not server._connections:
                time.sleep(0.01)
            for first in range(3, len(wire), 700):
                server._connections[0].sendall(wire[first : first + 700])

        with_pieces = threading.Timer(0.05, rest)
        with_pieces.start()
        assert tier.get([b"k"], LIMIT) == [value]
        with_pieces.join()
        tier.close()


def test_more_callers_than_connections_wait_their_turn(redis: RedisProcess) -> None:
    tier = RedisTier(redis.url, QUICK)
    with tier._connection(), pytest.raises(HostTierError, match="all connections are in use"):
        tier.get([b"k"], LIMIT)
    assert tier.get([b"k"], LIMIT) == [None]
    tier.close()


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2 -subj /CN=localhost"
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    value = os.urandom(300_000)
    scripts = [[b""], [b"$300000\r\n" + value + b"\r\n"]]
    with ScriptedServer(scripts, tls=context) as server:
        tier = RedisTier(f"rediss://{server.address}", RedisTierConfig(num_connections=1, timeout_s=5.0))
        with pytest.raises(HostTierError, match="certificate"):
            tier.get([b"k"], LIMIT)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert tier.get([b"k"], LIMIT) == [value]
        tier.close()


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("num_connections", {"num_connections": 0}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("ttl_ms", {"ttl_ms": 10}),
    ],
)
def test_a_bad_configuration_names_the_field(field: str, config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=field):
        RedisTierConfig(**config)


def test_a_value_in_parts_is_one_key_that_ends_by_itself(redis: RedisProcess) -> None:
    tier = RedisTier(redis.url, RedisTierConfig(ttl_ms=3_600_000))
    tier.put_parts(b"k", [[b"part %d" % number] for number in range(5)])
    with redis.client() as client:
        assert client.keys() == [b"k"]
        assert client.hgetall(b"k") == {b"%d" % number: b"part %d" % number for number in range(5)}
        assert 3_500_000 < client.pttl(b"k") <= 3_600_000
        client.unlink(b"k")
    assert list(tier.get_parts(b"k", 5, LIMIT)) == [None]
    tier.close()


def test_what_a_writer_leaves_half_written_is_found_by_nobody_and_ends_soon(redis: RedisProcess) -> None:
    def watched() -> Iterator[list[bytes]]:
        yield [b"first"]
        yield [b"second"]
        (name,) = client.keys()
        assert name.startswith(b"k:") and parse_key(name) is None
        assert 0 < client.pttl(name) <= UNFINISHED_MS
        raise ZeroDivisionError

    tier = RedisTier(redis.url)
    with redis.client() as client:
        with pytest.raises(ZeroDivisionError):
            tier.put_parts(b"k", watched())
        assert not client.exists(b"k")
    tier.close()


@pytest.mark.parametrize("killed_at", [0, 1, 2, 3])
def test_a_server_that_dies_between_parts_is_an_error(redis: RedisProcess, killed_at: int) -> None:
    def parts() -> Iterator[list[bytes]]:
        for number in range(4):
            if number == killed_at:
                redis.kill()
            yield [b"part %d" % number]

    tier = RedisTier(redis.url)
    with pytest.raises(HostTierError):
        tier.put_parts(b"k", parts())
    redis.start()
    assert list(tier.get_parts(b"k", 4, LIMIT)) == [None]
    tier.put_parts(b"k", [[b"part %d" % number] for number in range(4)])
    read = tier.get_parts(b"k", 4, LIMIT)
    found = [next(read)]
    redis.kill()
    with pytest.raises(HostTierError):
        found += list(read)
    redis.start()
    tier.close()


def test_a_value_whose_parts_vanish_as_they_are_written_is_an_error(redis: RedisProcess) -> None:
    def flushed() -> Iterator[list[bytes]]:
        yield [b"first"]
        with redis.client() as client:
            client.flushall()
        yield [b"second"]

    tier = RedisTier(redis.url)
    with pytest.raises(HostTierError, match="vanished"):
        tier.put_parts(b"k", flushed())
    assert list(tier.get_parts(b"k", 2, LIMIT)) == [None]
    tier.close()


def test_a_part_that_is_too_long_costs_its_connection_only() -> None:
    scripts = [[b"$1\r\na\r\n$999999999\r\nxxxx"], [b"$1\r\nc\r\n"]]
    with ScriptedServer(scripts) as server:
        tier = RedisTier(f"redis://{server.address}", QUICK)
        assert list(tier.get_parts(b"k", 2, 10)) == [b"a", None]
        assert tier.get([b"k"], 10) == [b"c"]
        tier.close()
