"""The server's life: ports, health, reflection, limits, and its end."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from rpc.client import open_channel
from rpc.errors import errors_to_status
from rpc.server import CannotListen, RpcServer
from session.limits import MAX_MESSAGE_BYTES
from tests.rpc.echo import LIMITS, NAME, SHAPES, call, code_of, serving, text, texts

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("service", ["", NAME])
async def test_health_is_serving_after_start(service: str) -> None:
    async with serving() as (_, channel, _):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == SERVING


async def test_health_of_an_unknown_service() -> None:
    async with serving(errors_to_status({})) as (_, channel, _):
        stub = health_pb2_grpc.HealthStub(channel)
        code, _ = await code_of(stub.Check(health_pb2.HealthCheckRequest(service="other")))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_all_health_watchers_hear_of_every_change() -> None:
    async with serving() as (_, channel, server):
        stub = health_pb2_grpc.HealthStub(channel)
        gone, first, second = [stub.Watch(health_pb2.HealthCheckRequest(service=NAME)) for _ in range(3)]
        assert [(await watch.read()).status for watch in (gone, first, second)] == [SERVING] * 3
        gone.cancel()
        await server.health.set_all(NOT_SERVING)
        assert [(await watch.read()).status for watch in (first, second)] == [NOT_SERVING] * 2


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_tells_of_the_services_and_of_itself(version: str) -> None:
    async with serving() as (_, channel, _):
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        name = f"grpc.reflection.{version}.ServerReflection"
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
        ]
        services, files = [answer async for answer in ask(iter(requests))]
        names = {service.name for service in services.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health", name} <= names
        file = descriptor_pb2.FileDescriptorProto.FromString(files.file_descriptor_response.file_descriptor_proto[0])
        (service,) = file.service
        assert f"{file.package}.{service.name}" == name
        assert service.method[0].input_type == f".grpc.reflection.{version}.ServerReflectionRequest"


async def test_health_checks_are_answered_when_no_more_calls_are_taken() -> None:
    async with serving(limits=LIMITS._replace(max_concurrent_calls=1)) as (echo, channel, _):
        hanging = asyncio.ensure_future(call(channel, "Unary", text("hang")))
        while not echo.asked:
            await asyncio.sleep(0.001)
        code, _ = await code_of(call(channel, "Unary", text("x")))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=NAME))
        assert response.status == SERVING
        hanging.cancel()


async def test_a_burst_is_refused_and_not_cancelled() -> None:
    """gRPC's own bound on calls that no handler has taken yet is 1,000; it cancels what is too much without a word."""
    async with serving(limits=LIMITS._replace(max_concurrent_calls=5)) as (echo, _, _):
        channels = [grpc.aio.insecure_channel(echo.address, options=[("test.number", at)]) for at in range(4)]
        calls = [call(channels[at % 4], "Unary", text("hang"), limit_s=None) for at in range(2500)]
        asked = [asyncio.ensure_future(code_of(one)) for one in calls]
        while sum(task.done() for task in asked) < 2495:
            await asyncio.sleep(0.05)
        assert {task.result()[0] for task in asked if task.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for task in asked:
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))


async def test_two_servers_never_share_a_port() -> None:
    async with serving() as (_, _, _):
        first = RpcServer([], [], LIMITS)
        address = await first.start("127.0.0.1:0")
        second = RpcServer([], [], LIMITS)
        with pytest.raises(CannotListen, match=str(address)):
            await second.start(str(address))
        await first.stop(0)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_message_over_the_limit_is_refused_and_the_server_lives(shape: str) -> None:
    async with serving(errors_to_status({}), limits=LIMITS._replace(max_message_bytes=1_000)) as (echo, channel, _):
        code, _ = await code_of(call(channel, shape, text("x" * 2_000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert echo.asked == []
        assert "small" in texts(await call(channel, shape, text("small")))


async def test_calls_beyond_the_limit_are_refused() -> None:
    async with serving(limits=LIMITS._replace(max_concurrent_calls=1)) as (echo, channel, _):
        hanging = asyncio.ensure_future(call(channel, "Unary", text("hang")))
        while not echo.asked:
            await asyncio.sleep(0.001)
        code, _ = await code_of(call(channel, "Unary", text("one more")))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        hanging.cancel()


async def test_stop_says_so_then_lets_calls_finish() -> None:
    async with serving() as (_, channel, server):
        stub = health_pb2_grpc.HealthStub(channel)
        health = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await health.read()).status == SERVING
        stream = channel.stream_stream(f"/{NAME}/Both")()
        await stream.write(text("one"))
        assert texts([await stream.read()]) == ["one"]

        async def before_close() -> None:
            assert (await health.read()).status == NOT_SERVING
            await stream.write(text("two"))
            assert texts([await stream.read()]) == ["two"]
            await stream.done_writing()

        await server.stop(30, before_close)
        assert await stream.code() is grpc.StatusCode.OK
        assert await health.code() is grpc.StatusCode.OK


async def test_stop_cuts_what_does_not_finish() -> None:
    async with serving() as (echo, channel, server):
        hanging = asyncio.ensure_future(code_of(call(channel, "Unary", text("hang"))))
        while not echo.asked:
            await asyncio.sleep(0.001)
        await server.stop(0.05, asyncio.Event().wait)
        code, _ = await hanging
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_channel_finds_a_restarted_server() -> None:
    server = RpcServer([], [], LIMITS)
    address = str(await server.start("127.0.0.1:0"))
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        await server.stop(0)
        server = RpcServer([], [], LIMITS)
        await server.start(address)
        try:
            assert await status_once_connected(stub) == SERVING
        finally:
            await server.stop(0)


async def status_once_connected(stub: health_pb2_grpc.HealthStub) -> int:
    """A call that begins before the client has seen its old connection end is lost with it, as gRPC says; once."""
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
    return int(answer.status)
