"""Bad input over real gRPC and with the real manager: a clear refusal by the field's name, and nothing changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from protos.v1 import cache_pb2, types_pb2
from tests.cache_service.peer import Client, Peer, started
from tests.core import audit
from tests.core.snapshot import snapshot
from tests.rpc.echo import code_of
from tests.session.messages import PAGE, acquire, full_adopt, full_step, hello, publish, release, tokens, u32, u64
from tests.session.test_wire_to_service import BAD_HELLOS, BAD_ITEMS, BAD_STEPS, Spoil

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MESSAGE_MB = 1

Send = Callable[[Peer], Any]


@asynccontextmanager
async def busy(**settings: Any) -> AsyncIterator[tuple[Client, Peer]]:
    """A service whose worker holds sequence 7 (40 tokens, two pages published) and has cached another prompt."""
    async with started(**settings) as client:
        peer = await client.connected()
        await peer.step(acquires=[acquire(7, tokens(40)), acquire(8, tokens(40, 500))])
        await peer.step(publishes=[publish(7, 33), publish(8, 40)], releases=[release(8)])
        yield client, peer


async def refused(send: Send, **settings: Any) -> tuple[grpc.StatusCode, str]:
    """What a bad message on a busy worker's stream is answered with; asserts that it changed nothing."""
    async with busy(**settings) as (client, peer):
        before = snapshot(client.manager)
        await send(peer)
        answer = await peer.ended()
        again = client.peer()
        assert (await again.hello(generation=peer.generation)).generation == peer.generation
        assert snapshot(client.manager) == before
        audit.check(client.manager)
        reply = await again.step(step_id=3, acquires=[acquire(9, tokens(40))])
        assert reply.grants[0].cached_tokens == 32
        return answer


@pytest.mark.parametrize(("field", "spoil"), BAD_HELLOS)
async def test_a_bad_hello(field: str, spoil: Spoil) -> None:
    async with busy() as (client, peer):
        before = snapshot(client.manager)
        message, late = hello(), client.peer()
        spoil(message)
        await late.send(hello=message)
        code, details = await late.ended()
        assert (code, details.startswith(f"{field}: ")) == (INVALID, True), details
        assert snapshot(client.manager) == before
        await peer.step()


@pytest.mark.parametrize(("field", "spoil"), BAD_STEPS)
async def test_a_bad_step(field: str, spoil: Spoil) -> None:
    message = full_step()
    message.step_id = 3
    spoil(message)
    # 100 tokens are the limit that the table counts on.
    code, details = await refused(lambda peer: peer.send(step=message), max_sequence_tokens=100)
    assert (code, details.startswith(f"{field}: ")) == (INVALID, True), details


@pytest.mark.parametrize(("name", "field", "spoil"), BAD_ITEMS)
async def test_a_bad_item_of_a_step(name: str, field: str, spoil: Spoil) -> None:
    """It is refused by its field's name; the rest of the step is applied."""
    whole, message = full_step(), cache_pb2.Step()
    spoil(whole)
    getattr(message, name).extend(getattr(whole, name)[:1])
    message.acquires.append(GOOD)
    async with busy(max_sequence_tokens=100) as (client, peer):
        reply = await peer.step(**{name: getattr(message, name), "acquires": message.acquires})
        (refusal,) = reply.refusals
        assert (refusal.reason, refusal.sequence_id) == (
            types_pb2.REFUSAL_REASON_INVALID,
            getattr(whole, name)[0].sequence_id,
        )
        assert refusal.field == ".".join(filter(None, (f"step.{name}[0]", field)))
        assert [grant.sequence_id for grant in reply.grants] == [GOOD.sequence_id]
        audit.check(client.manager)


def stepping(**fields: Any) -> Send:
    return lambda peer: peer.send(step=cache_pb2.Step(**{"step_id": 3, **fields}))


def extending(sequence_id: int, num_tokens: int) -> cache_pb2.Extends:
    return cache_pb2.Extends(sequence_ids=u64([sequence_id]), num_tokens=u32([num_tokens]))


def ack(ticket: int) -> cache_pb2.Ack:
    return cache_pb2.Ack(ticket=ticket, num_done=1, status=cache_pb2.TRANSFER_STATUS_DONE)


async def test_a_step_id_that_goes_back() -> None:
    code, details = await refused(stepping(step_id=1))
    assert (code, details.startswith("step.step_id: ")) == (INVALID, True), details


async def test_an_ack_of_a_ticket_that_was_never_issued() -> None:
    """It belongs to no sequence: nothing of its step is applied."""
    code, details = await refused(stepping(acks=[ack(4711)], acquires=[GOOD]))
    assert (code, details.startswith("step.acks[0].ticket: ")) == (INVALID, True), details


GOOD = acquire(20, tokens(40))
NONSENSE: list[tuple[str, dict[str, Any]]] = [
    ("step.publishes[0].sequence_id", {"publishes": [publish(99, 16)]}),
    ("step.publishes[0].computed_tokens", {"publishes": [publish(7, 2_000)]}),
    ("step.publishes[0].computed_tokens", {"publishes": [publish(7, 10)]}),
    ("step.publishes[0].tokens", {"publishes": [publish(7, 40, tokens(61))]}),
    ("step.releases[0].sequence_id", {"releases": [release(99)]}),
    ("step.releases[1].sequence_id", {"releases": [release(7), release(7)]}),
    ("step.extends[0].sequence_id", {"extends": extending(99, 64)}),
    ("step.extends[0].num_tokens", {"extends": extending(7, 101)}),
    ("step.acquires[0].sequence_id", {"acquires": [acquire(7, tokens(PAGE)), GOOD]}),
    ("step.acquires[1].sequence_id", {"acquires": [GOOD, GOOD]}),
]


@pytest.mark.parametrize(("field", "fields"), NONSENSE)
async def test_a_well_formed_item_that_makes_no_sense(field: str, fields: dict[str, Any]) -> None:
    async with busy(max_sequence_tokens=100) as (client, peer):
        reply = await peer.step(**{"acquires": [GOOD], **fields})
        assert [(r.reason, r.field) for r in reply.refusals] == [(types_pb2.REFUSAL_REASON_INVALID, field)]
        assert [grant.sequence_id for grant in reply.grants] == [GOOD.sequence_id]
        audit.check(client.manager)


def adopting(**fields: Any) -> cache_pb2.Adopt:
    message = full_adopt()
    message.ClearField("working")
    message.ClearField("rolling")
    for name, value in fields.items():
        message.ClearField(name)
        getattr(message, name).extend(value) if isinstance(value, list) else setattr(message, name, value)
    return message


def pages(group: int, first_page: int, *page_ids: int) -> types_pb2.GroupPages:
    return types_pb2.GroupPages(group=group, first_page=first_page, page_ids=u32(page_ids))


NONSENSE_ADOPTS: list[tuple[str, cache_pb2.Adopt]] = [
    ("sequence_id", adopting(sequence_id=7)),
    ("computed_tokens", adopting(computed_tokens=21)),
    ("tables", adopting(tables=[])),
    ("tables", adopting(tables=[pages(5, 0, 30, 31)])),
    ("tables[0].page_ids", adopting(tables=[pages(0, 0, 30, 30)])),
    ("tables[0].page_ids", adopting(tables=[pages(0, 0, 30, 2_000)])),
    ("tables[0].page_ids", adopting(tables=[pages(0, 2**32 - 1, 30, 31)])),
    ("working", adopting(working=[types_pb2.SnapshotSlot(group=0, slot=1)])),
]


@pytest.mark.parametrize(("field", "message"), NONSENSE_ADOPTS)
async def test_a_well_formed_adopt_that_makes_no_sense(field: str, message: cache_pb2.Adopt) -> None:
    async with busy() as (client, peer):
        before = snapshot(client.manager)
        (refusal,) = (await peer.step(adopts=[message])).refusals
        assert (refusal.reason, refusal.field) == (types_pb2.REFUSAL_REASON_INVALID, f"step.adopts[0].{field}")
        assert snapshot(client.manager) == before


# Page 3 is sequence 7's own, page 4 holds another prompt.
@pytest.mark.parametrize("page_ids", [(30, 3), (4, 31)])
async def test_an_adopt_of_pages_that_are_taken_is_refused_as_a_value(page_ids: tuple[int, int]) -> None:
    async with busy() as (client, peer):
        before = snapshot(client.manager)
        (refusal,) = (await peer.step(adopts=[adopting(tables=[pages(0, 0, *page_ids)])])).refusals
        assert (refusal.sequence_id, refusal.reason) == (5, types_pb2.REFUSAL_REASON_NO_ROOM)
        assert snapshot(client.manager) == before
        await peer.step()


async def test_groups_that_differ_from_what_the_incarnation_said() -> None:
    async with busy() as (client, _):
        late = client.peer()
        await late.send(hello=hello(num_pages=8))
        code, details = await late.ended()
        assert (code, details.startswith("hello.groups")) == (INVALID, True)


HOST_TIER = ("Attach", "Lookup", "Reserve", "Commit", "Release")
UNARY = ("Match", "Explain", "Stats", "Pin", "Clear", *HOST_TIER)
METHODS = {**dict.fromkeys(UNARY, "Unary"), "Watch": "Out", "Session": "Both"}
ADMIN = ("Pin", "Clear")


async def raw_call(client: Client, method: str, raw: bytes) -> list[bytes]:
    """Sends bytes as they are, without any serializer."""
    channel = client.admin_channel if method in ADMIN else client.channel
    service = "CacheAdmin" if method in ADMIN else "HostTier" if method in HOST_TIER else "PrefixCache"
    path = f"/stemcache.v1.{service}/{method}"
    if METHODS[method] == "Unary":
        return [await channel.unary_unary(path)(raw)]
    stream: Any = channel.unary_stream(path)(raw) if method == "Watch" else channel.stream_stream(path)(iter([raw]))
    return [await stream.read()]


@pytest.mark.parametrize("method", METHODS)
async def test_a_message_over_the_limit(method: str) -> None:
    async with busy(max_message_mb=MESSAGE_MB) as (client, peer):
        before = snapshot(client.manager)
        code, _ = await code_of(raw_call(client, method, b"x" * (MESSAGE_MB << 20) + b"x"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert snapshot(client.manager) == before
        await peer.step()


UNPARSABLE = {
    "a cut varint": b"\xff",
    "a cut length": b"\x0a\xff",
    "a cut field": b"\x0a\x05ab",
    "zeros": b"\x00" * 9,
    "every byte": bytes(range(256)),
}


@pytest.mark.parametrize("raw", UNPARSABLE.values(), ids=UNPARSABLE)
@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message(method: str, raw: bytes) -> None:
    async with busy() as (client, peer):
        before = snapshot(client.manager)
        code, details = await code_of(raw_call(client, method, raw))
        assert code is INVALID, details
        assert snapshot(client.manager) == before
        await peer.step()


async def test_health_and_reflection_take_no_random_bytes_either() -> None:
    async with started() as client:
        for name, method, shape in (
            ("grpc.health.v1.Health", "Check", "unary_unary"),
            ("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", "stream_stream"),
        ):
            make = getattr(client.channel, shape)(f"/{name}/{method}")
            asked = make(b"\xff\xff") if shape == "unary_unary" else make(iter([b"\xff\xff"])).read()
            assert (await code_of(asked))[0] is INVALID
        # One message: a stream's write that meets the reply is told as INTERNAL by gRPC's own client (grpc/grpc#36066).
        code, _ = await code_of(client.channel.unary_unary("/stemcache.v1.PrefixCache/NoSuch")(b""))
        assert code is grpc.StatusCode.UNIMPLEMENTED
