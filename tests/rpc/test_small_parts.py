"""Addresses, log lines, redaction, and the metrics endpoint."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from rpc.address import HostPort, parse_address
from rpc.listener import choose_listener
from rpc.logs import Outage, announcement, redact_url, set_up_logging
from rpc.metrics_http import MAX_HEAD_BYTES, MetricsServer


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:0", HostPort("127.0.0.1", 0)),
        ("cache:7400", HostPort("cache", 7400)),
        ("[::1]:65535", HostPort("::1", 65535)),
    ],
)
def test_addresses(text: str, parsed: HostPort) -> None:
    assert parse_address(text) == parsed
    assert str(parsed) == text


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1", "::1:80", "host:²"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


@pytest.mark.parametrize(
    ("set_by_user", "kept"),
    [({}, "-event_engine_listener"), ({"GRPC_EXPERIMENTS": ""}, ""), ({"GRPC_EXPERIMENTS": "other"}, "other")],
)
def test_the_users_own_listener_wins(set_by_user: dict[str, str], kept: str) -> None:
    choose_listener(set_by_user)
    assert set_by_user == {"GRPC_EXPERIMENTS": kept}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://me:pw@host:6379/0", "redis://me:***@host:6379/0"),
        ("redis://:p@ss@host:6379", "redis://:***@host:6379"),
        ("redis://:pw@[::1", "***"),
        ("redis://host:6379/0?password=pw", "redis://host:6379/0?***"),
        ("redis://me@host?db=1&password=pw", "redis://me@host?***"),
        ("redis://me:pw@host/0?password=pw#pw", "redis://me:***@host/0?***#***"),
        ("unix://:pw@/run/r.sock?db=4", "unix://:***@/run/r.sock?***"),
        ("unix:///run/r.sock", "unix:///run/r.sock"),
        # What stands behind a "/", "?" or "#" of a password that is not escaped.
        ("redis://me:12/pw@host:6379/0", "***"),
        ("redis://me:12?pw@host:6379/0", "***"),
        ("redis://me:12#pw@host:6379/0", "***"),
        ("redis://me:p/w", "***"),
    ],
)
def test_redaction(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("root_logger")
def test_a_log_record_is_one_line_of_json() -> None:
    stream = io.StringIO()
    set_up_logging("svc", "info", stream)
    log = logging.getLogger("part")
    log.debug("not this")
    log.info("two\nlines %d", 7, extra={"worker": "w1", "odd": {1, 2}})
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("broke")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["level"], first["service"], first["logger"], first["message"], first["worker"]) == (
        "info",
        "svc",
        "part",
        "two\nlines 7",
        "w1",
    )
    assert "ValueError: inside" in second["exception"]


async def ask(address: HostPort, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(head)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_metrics_are_served() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("pages_held", "Pages.", registry=registry)
    server = MetricsServer(registry)
    address = await server.start("127.0.0.1:0")
    try:
        for value in (1, 2):
            gauge.set(value)
            answer = await ask(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\npages_held %d.0\n" % value in answer
        assert (await ask(address, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await ask(address, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await ask(address, b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert await ask(address, b"x" * (MAX_HEAD_BYTES + 100)) == b""
        assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    finally:
        await server.stop()


def test_an_announcement_has_the_shape_of_the_log() -> None:
    stream = io.StringIO()
    set_up_logging("svc", "info", stream)
    logging.getLogger("svc").info("listening")
    logged, announced = json.loads(stream.getvalue()), json.loads(announcement("svc", address="127.0.0.1:1", admin=""))
    assert set(logged) <= set(announced)
    assert {**announced, "time": ""} == {**logged, "time": "", "event": "listening", "address": "127.0.0.1:1"}


def test_an_outage_is_logged_once_and_at_its_end() -> None:
    stream = io.StringIO()
    set_up_logging("svc", "info", stream)
    outage = Outage(logging.getLogger("part"), "no session")
    outage.ended()
    for number in range(3):
        outage.failed(OSError(f"try {number}"))
    outage.ended()
    outage.failed(OSError("again"))
    first, end, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["level"], first["message"]) == ("warning", "no session: try 0; trying on")
    assert (end["message"], end["failures"]) == ("no session is over", 3)
    assert second["message"] == "no session: again; trying on"
