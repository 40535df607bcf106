"""Calls of all four shapes through the whole chain of middleware."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest as Text
from prometheus_client import CollectorRegistry

from rpc.client import open_channel
from rpc.deadline import deadlines
from rpc.errors import MAX_DETAILS, errors_to_status
from rpc.interceptor import Call, Proceed, Progress
from rpc.metrics import Durations, RpcMetrics
from rpc.request_id import MAX_LENGTH, with_request_id
from rpc.server import RpcServer, Service
from session.limits import MAX_MESSAGE_BYTES
from tests.rpc.echo import LIMITS, NAME, SHAPES, KnownError, call, code_of, serving, text, texts

TABLE = {KnownError: grpc.StatusCode.FAILED_PRECONDITION}
UNPARSABLE = b"\xff\xff\xff\xff"


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_good_call_is_answered(shape: str) -> None:
    async with serving(errors_to_status(TABLE)) as (_, channel, _):
        assert "hello" in texts(await call(channel, shape, text("hello")))


@pytest.mark.parametrize("shape", SHAPES)
async def test_unparsable_bytes_are_an_invalid_argument(shape: str) -> None:
    async with serving(errors_to_status(TABLE)) as (echo, channel, _):
        code, details = await code_of(call(channel, shape, UNPARSABLE))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "4 bytes" in details
        assert echo.asked == []
        assert "still here" in texts(await call(channel, shape, text("still here")))


async def test_unparsable_bytes_in_mid_stream_end_the_stream() -> None:
    async with serving(errors_to_status(TABLE)) as (echo, channel, _):
        code, _ = await code_of(call(channel, "Both", text("one"), UNPARSABLE, text("two")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert echo.asked == ["one"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["known", "narrower"])
async def test_known_errors_follow_the_table(shape: str, kind: str) -> None:
    async with serving(errors_to_status(TABLE)) as (_, channel, _):
        answer = await code_of(call(channel, shape, text(f"{kind} leases in scope")))
        assert answer == (grpc.StatusCode.FAILED_PRECONDITION, "leases in scope")


def failing(error: Exception) -> Proceed:
    async def proceed() -> None:
        raise error

    return proceed


class PeerLeft:
    """The context of a call whose peer has left, before gRPC has noticed it."""

    def cancelled(self) -> bool:
        return False

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.InternalError(f"nobody takes {code}: {details}")


async def test_a_status_that_nobody_takes_ends_the_call_quietly() -> None:
    call_of_nobody = Call("/a/B", is_unary=True, context=PeerLeft(), progress=Progress())  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await errors_to_status(TABLE)(call_of_nobody, failing(KnownError("too late")))


async def test_long_details_are_clipped() -> None:
    async with serving(errors_to_status(TABLE)) as (_, channel, _):
        _, details = await code_of(call(channel, "Unary", text("known " + "ä" * 9_000)))
        assert len(details) == MAX_DETAILS


@pytest.mark.parametrize("shape", SHAPES)
async def test_unexpected_errors_tell_the_log_and_not_the_caller(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(with_request_id, errors_to_status(TABLE)) as (_, channel, _):
        with caplog.at_level(logging.ERROR):
            asked = call(channel, shape, text("unexpected password=hunter2"), metadata=(("x-request-id", "req-7"),))
            answer = await code_of(asked)
    assert answer == (grpc.StatusCode.INTERNAL, "internal error; request id req-7")
    assert "hunter2" in caplog.text


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_callers_request_id_is_kept(shape: str) -> None:
    async with serving(with_request_id) as (_, channel, _):
        assert "abc-1" in texts(await call(channel, shape, text("id"), metadata=(("x-request-id", "abc-1"),)))


@pytest.mark.parametrize("offered", [None, "", "x" * (MAX_LENGTH + 1)])
async def test_a_request_id_is_drawn(offered: str | None) -> None:
    metadata = None if offered is None else (("x-request-id", offered),)
    async with serving(with_request_id) as (_, channel, _):
        first, second = [texts(await call(channel, "Unary", text("id"), metadata=metadata))[0] for _ in range(2)]
    assert len(first) == len(second) == 16
    assert first != second


async def test_a_call_without_a_deadline_gets_one() -> None:
    async with serving(errors_to_status(TABLE), deadlines(0.05)) as (echo, channel, _):
        code, details = await code_of(call(channel, "Unary", text("hang"), limit_s=None))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.050" in details
        assert echo.ended == ["hang"]


async def test_a_method_may_have_its_own_deadline() -> None:
    async with serving(deadlines(600, {f"/{NAME}/Unary": 0.05})) as (_, channel, _):
        code, _ = await code_of(call(channel, "Unary", text("hang"), limit_s=None))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_method_that_never_waits_needs_no_timer() -> None:
    exempt = deadlines(0.05, {f"/{NAME}/Unary": None})
    async with serving(exempt) as (_, channel, _):
        code, _ = await code_of(call(channel, "Unary", text("hang"), limit_s=0.5))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED  # the caller's own, ten times ours
        assert texts(await call(channel, "Unary", text("fine"))) == ["fine"]


async def test_a_response_may_be_serialized_already() -> None:
    def add(servicer: Any, server: Any) -> None:
        async def answer(request: Any, context: Any) -> bytes:
            return text("as it is") if request.service else b""

        handler = grpc.unary_unary_rpc_method_handler(answer, Text.FromString, Text.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"Unary": handler}),))

    server = RpcServer([Service(NAME, add, None)], [], LIMITS)
    address = await server.start("127.0.0.1:0")
    async with open_channel(str(address), MAX_MESSAGE_BYTES) as channel:
        assert await call(channel, "Unary", text("x")) == [text("as it is")]
        assert await call(channel, "Unary", b"") == [b""]
    await server.stop(0)


async def test_a_stream_whose_peer_never_reads_is_ended_and_frees_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rpc.deadline")
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    limited = deadlines(600, {f"/{NAME}/Out": 0.5})
    async with (
        serving(limited, limits=LIMITS._replace(max_concurrent_calls=1)) as (echo, channel, _),
        grpc.aio.insecure_channel(echo.address, options=small_window) as deaf,
    ):
        never_read = deaf.unary_stream(f"/{NAME}/Out")(text("flood"))
        while not echo.asked:
            await asyncio.sleep(0.01)
        code, details = await code_of(call(channel, "Unary", text("too many")))
        assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1 calls are being served already")
        while not echo.ended:
            await asyncio.sleep(0.01)
        assert echo.ended == ["flood"]
        assert "does not read" in caplog.text
        assert texts(await call(channel, "Unary", text("room again"))) == ["room again"]
        # A client that reads after all is told.
        async with asyncio.timeout(20):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                _ = [message async for message in never_read]
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_may_have_a_deadline() -> None:
    async with serving(deadlines(600, {f"/{NAME}/Out": 0.05})) as (echo, channel, _):
        code, _ = await code_of(call(channel, "Out", text("hang")))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert echo.ended == ["hang"]


async def test_streams_have_no_deadline_of_ours() -> None:
    async with serving(deadlines(0.01)) as (_, channel, _):
        stream = channel.stream_stream(f"/{NAME}/Both")()
        await asyncio.sleep(0.05)
        await stream.write(text("late"))
        assert texts([await stream.read()]) == ["late"]
        stream.cancel()


@pytest.mark.parametrize(
    "error", [grpc.aio.InternalError("Failed ExecuteBatch"), grpc.aio.UsageError("RPC already finished.")]
)
async def test_a_peer_that_leaves_during_a_write_is_no_error(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The write fails a moment before the call counts as cancelled."""

    class Context:
        def cancelled(self) -> bool:
            return False

    context: Any = Context()
    with caplog.at_level(logging.DEBUG), pytest.raises(asyncio.CancelledError):
        await errors_to_status(TABLE)(Call("/Watch", False, context, Progress()), failing(error))
    assert [record.levelno for record in caplog.records if record.name == "rpc.errors"] == [logging.DEBUG]


async def test_a_cancelled_call_ends_its_handler() -> None:
    async with serving(errors_to_status(TABLE)) as (echo, channel, _):
        hanging = channel.unary_unary(f"/{NAME}/Unary")(text("hang"))
        while not echo.asked:
            await asyncio.sleep(0.001)
        hanging.cancel()
        while not echo.ended:
            await asyncio.sleep(0.001)


async def test_calls_are_counted_by_method_and_code() -> None:
    registry = CollectorRegistry()
    async with serving(RpcMetrics(registry), errors_to_status(TABLE)) as (_, channel, _):
        await call(channel, "Unary", text("fine"))
        await code_of(call(channel, "Unary", text("known reason")))
        await code_of(call(channel, "Out", UNPARSABLE))
        await code_of(call(channel, "Unary", text("x"), name="no.Such"))

    def handled(method: str, code: str) -> float | None:
        labels = {"method": f"/{NAME}/{method}", "code": code}
        return registry.get_sample_value("stemcache_rpc_handled_total", labels)

    assert handled("Unary", "OK") == 1
    assert handled("Unary", "FAILED_PRECONDITION") == 1
    assert handled("Out", "INVALID_ARGUMENT") == 1
    unary = {"method": f"/{NAME}/Unary"}
    assert registry.get_sample_value("stemcache_rpc_duration_seconds_count", unary) == 2
    assert registry.get_sample_value("stemcache_rpc_duration_seconds_bucket", {**unary, "le": "+Inf"}) == 2
    assert (registry.get_sample_value("stemcache_rpc_duration_seconds_sum", unary) or 0) > 0
    assert registry.get_sample_value("stemcache_rpc_duration_seconds_count", {"method": f"/{NAME}/Out"}) is None
    assert registry.get_sample_value("stemcache_rpc_in_flight", unary) == 0
    assert registry.get_sample_value("stemcache_rpc_handled_total", {"method": "/no.Such/Unary", "code": "OK"}) is None


def test_durations_are_counted_up_to_each_bound() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 2.0):
        durations.observe(seconds)
    assert durations.rows() == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert durations.sum_s == 2.65
