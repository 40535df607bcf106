"""Session streams: who speaks for a worker, what ends a stream, and what the manager hears of it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cache_service.core.base.errors import Superseded, UnknownSequence
from protos.v1 import cache_pb2
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from session.words import Transfer
from tests.cache_service.peer import Client, Peer, started, until
from tests.cache_service.scripted import ScriptedManager, order
from tests.session.messages import hello, sealed


@asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[tuple[Client, ScriptedManager]]:
    manager = ScriptedManager()
    async with started(lambda config, epoch: manager, **settings) as client:
        yield client, manager


async def test_hello_is_welcomed_and_steps_are_answered_in_turn() -> None:
    async with scripted() as (client, manager):
        peer = client.peer()
        welcome = await peer.hello()
        assert welcome.epoch == "scripted"
        assert [(await peer.step()).step_id for _ in range(3)] == [1, 2, 3]
        await peer.hang_up()
        assert manager.verbs() == ["hello", "step", "step", "step", "disconnect"]
        assert manager.calls[-1] == ("disconnect", "w1", "first")


async def test_goodbye_ends_the_stream_well() -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        await peer.send(goodbye=cache_pb2.Goodbye())
        assert (await peer.ended())[0] is grpc.StatusCode.OK
        assert manager.verbs() == ["hello", "goodbye"]


@pytest.mark.parametrize(
    "first",
    [{}, {"step": cache_pb2.Step(step_id=1)}, {"goodbye": cache_pb2.Goodbye()}],
)
async def test_the_first_message_is_hello(first: dict[str, Any]) -> None:
    async with scripted() as (client, manager):
        peer = client.peer()
        await peer.send(**first)
        assert await peer.ended() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "session: the first message must be Hello",
        )
        assert manager.verbs() == []


async def test_a_stream_without_a_message_is_refused() -> None:
    async with scripted() as (client, manager):
        peer = client.peer()
        await peer.stream.done_writing()
        assert (await peer.ended())[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert manager.verbs() == []


@pytest.mark.parametrize("later", [{}, {"hello": hello()}])
async def test_what_is_not_expected_later_ends_the_stream(later: dict[str, Any]) -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        await peer.send(**later)
        code, details = await peer.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("session: ")
        await until(lambda: manager.verbs() == ["hello", "disconnect"])


async def test_a_silent_stream_is_ended() -> None:
    async with scripted(hello_timeout_s=0.05) as (client, manager):
        code, details = await client.peer().ended()
        assert (code, details) == (grpc.StatusCode.DEADLINE_EXCEEDED, "session: did not say Hello within 0.05 s")
        assert manager.verbs() == []


async def test_the_newest_stream_of_a_worker_wins() -> None:
    async with scripted() as (client, manager):
        older = await client.connected()
        await older.step()
        newer = await client.connected()
        code, details = await older.ended()
        assert (code, details) == (
            grpc.StatusCode.ABORTED,
            "session: a newer stream of this worker took over",
        )
        await newer.step()
        # The old stream's end is no disconnect: the worker is there.
        assert manager.verbs() == ["hello", "step", "hello", "step"]


async def test_a_step_that_comes_after_a_newer_hello_is_not_applied() -> None:
    """It was on its way when the newer stream took over, and that one may be of another incarnation."""
    async with scripted() as (client, manager):
        sessions, arrived, written = client.service.sessions, asyncio.Event(), asyncio.Event()

        async def requests() -> AsyncIterator[cache_pb2.SessionRequest]:
            yield sealed(hello=hello())
            await arrived.wait()
            yield sealed(step=cache_pb2.Step(step_id=1))

        class Context:
            async def write(self, message: Any) -> None:
                written.set()

        context: Any = Context()
        older = asyncio.ensure_future(sessions.serve(requests(), context))
        await written.wait()
        await asyncio.sleep(0)
        newer: Any = type("Newer", (), {"worker_id": "w1", "orders_due": asyncio.Event()})()
        sessions.enter(newer)
        arrived.set()
        with pytest.raises(Superseded):
            await older
        assert manager.verbs() == ["hello"]
        sessions.leave(newer)


@pytest.mark.parametrize("at_hello", [True, False])
async def test_a_damaged_message_ends_the_stream(at_hello: bool) -> None:
    async with scripted() as (client, manager):
        peer = client.peer()
        if not at_hello:
            await peer.hello()
        message = sealed(hello=hello()) if at_hello else sealed(step=cache_pb2.Step(step_id=1))
        message.body = message.body[:-1] + bytes([message.body[-1] ^ 1])
        await peer.stream.write(message)
        code, details = await peer.ended()
        assert code is grpc.StatusCode.DATA_LOSS
        assert details.startswith("session.crc32: ")
        await until(lambda: manager.verbs() == ([] if at_hello else ["hello", "disconnect"]))


async def test_a_body_that_is_no_message_ends_the_stream() -> None:
    async with scripted() as (client, _):
        peer = await client.connected()
        await peer.stream.write(cache_pb2.SessionRequest(body=b"\xff", crc32=zlib.crc32(b"\xff")))
        code, details = await peer.ended()
        assert (code, details.startswith("session.body: ")) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_workers_do_not_disturb_each_other() -> None:
    async with scripted() as (client, manager):
        first, second = await client.connected(worker_id="w1"), await client.connected(worker_id="w2")
        await first.hang_up()
        await second.step()
        assert manager.calls[-2:] == [("disconnect", "w1", "first"), ("step", "w2", 1)]


async def test_a_cut_connection_is_a_disconnect() -> None:
    async with scripted() as (client, manager):
        async with open_channel(str(client.service.address), MAX_MESSAGE_BYTES) as channel:
            await Peer(channel).hello()
        await until(lambda: ("disconnect", "w1", "first") in manager.calls)


async def test_a_cancelled_stream_is_a_disconnect() -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        peer.stream.cancel()
        await until(lambda: ("disconnect", "w1", "first") in manager.calls)


async def test_a_refused_hello_leaves_the_current_stream_alone() -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        manager.raises = UnknownSequence("hello", "scripted")
        late = client.peer()
        await late.send(hello=hello())
        assert (await late.ended())[0] is grpc.StatusCode.INVALID_ARGUMENT
        manager.raises = None
        await peer.step()
        assert manager.verbs() == ["hello", "hello", "step"]


async def test_a_refused_step_names_its_field_and_ends_the_stream() -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        manager.raises = UnknownSequence("step.publishes[0].sequence_id", "7 holds no lease")
        await peer.send(step=cache_pb2.Step(step_id=1))
        assert await peer.ended() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "step.publishes[0].sequence_id: 7 holds no lease",
        )
        manager.raises = None
        await until(lambda: manager.verbs()[-1] == "disconnect")
        await (await client.connected()).step(step_id=1)


async def test_a_fault_of_ours_is_internal_and_the_service_lives() -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        manager.raises = AssertionError("pages lost: secret detail")
        await peer.send(step=cache_pb2.Step(step_id=1))
        code, details = await peer.ended()
        assert code is grpc.StatusCode.INTERNAL
        assert "secret" not in details
        manager.raises = None
        await (await client.connected()).step(step_id=1)


async def test_orders_follow_the_reply_that_caused_them() -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        manager.orders["w1"] = [order(1), order(2)]
        await peer.step()
        assert peer.orders == []
        assert [(await peer.receive()).order.spill.ticket for _ in range(2)] == [1, 2]


async def test_orders_come_without_being_asked_for() -> None:
    async with scripted(tick_ms=5) as (client, manager):
        peer, other = await client.connected(worker_id="w1"), await client.connected(worker_id="w2")
        manager.orders["w2"] = [order(9)]
        assert (await other.receive()).order.spill.ticket == 9
        await peer.step()
        assert peer.orders == []


async def test_time_goes_on_after_a_tick_that_failed() -> None:
    async with scripted(tick_ms=5) as (client, manager):
        manager.raises = RuntimeError("scripted")
        before = len(manager.calls)
        await until(lambda: len(manager.calls) > before + 2)
        manager.raises = None
        await (await client.connected()).step()


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    async with scripted(write_timeout_s=0.2, tick_ms=5) as (client, manager):
        peer = await client.connected()
        manager.orders["w1"] = [order(number, "k" * 1_000_000) for number in range(64)]
        await until(lambda: "disconnect" in manager.verbs())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            for _ in range(64):
                await peer.receive()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "session: took no message for 0.2 s"


class EndsAtWelcome(ScriptedManager):
    """Calls `end_soon` just before the Welcome is written, so that a stream ends while that write is in flight."""

    end_soon: Callable[[], object] = staticmethod(lambda: None)

    def take_orders(self, worker_id: str) -> tuple[Transfer, ...]:
        asyncio.get_running_loop().call_soon(self.end_soon)
        return super().take_orders(worker_id)


@pytest.mark.parametrize("turn", range(5))
async def test_a_stream_that_ends_while_its_welcome_is_written_gets_its_status(turn: int) -> None:
    manager = EndsAtWelcome()
    async with started(lambda config, epoch: manager) as client:
        closing: list[asyncio.Task[None]] = []
        manager.end_soon = lambda: closing.append(asyncio.ensure_future(client.service.sessions.close()))
        peer = await client.connected()
        assert await peer.ended() == (grpc.StatusCode.UNAVAILABLE, "session: the service is shutting down")
        await asyncio.gather(*closing)


async def test_there_are_only_so_many_streams() -> None:
    async with scripted(max_sessions=2) as (client, _):
        first, silent = await client.connected(worker_id="w1"), client.peer()
        await silent.send()
        await silent.ended()
        second = await client.connected(worker_id="w2")
        third = client.peer()
        assert (await third.ended())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await second.hang_up()
        await (await client.connected(worker_id="w3")).step()
        await first.step()


async def test_the_end_of_the_service_is_told_to_every_stream() -> None:
    async with scripted() as (client, manager):
        peer = await client.connected()
        await peer.step()
        watch = client.stub.Watch(cache_pb2.WatchRequest())
        await watch.read()
        closing = asyncio.ensure_future(client.service.sessions.close())
        assert await peer.ended() == (grpc.StatusCode.UNAVAILABLE, "session: the service is shutting down")
        await closing
        assert manager.verbs()[-1] == "disconnect"
        late = client.peer()
        assert (await late.ended())[0] is grpc.StatusCode.UNAVAILABLE
