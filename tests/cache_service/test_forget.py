"""Clear over gRPC and workers that keep an inventory: each is told what to forget, and Clear waits for its word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cache_service import servicer
from protos.v1 import cache_pb2
from tests.cache_service.peer import Client, Peer, started, until
from tests.session.messages import full_run, hello, namespace, publish, release

CLEAR = cache_pb2.ClearRequest(namespace=namespace("tenant"))


async def keeper(client: Client, name: str = "w1", generation: int = 0) -> tuple[Peer, Any]:
    """Returns a worker that keeps an inventory, and its Welcome."""
    peer, message = client.peer(), hello(name)
    message.capabilities.append("inventory")
    message.generation = generation
    await peer.send(hello=message)
    return peer, (await peer.receive()).welcome


async def test_clear_returns_when_every_worker_has_confirmed() -> None:
    async with started() as client:
        first, _ = await keeper(client)
        second, _ = await keeper(client, "w2")
        await client.connected(worker_id="w3")  # keeps none, and is not waited for
        clearing = asyncio.ensure_future(client.admin.Clear(CLEAR))
        for peer in (first, second):
            assert not clearing.done()
            order = (await peer.receive()).order
            assert not order.HasField("spill")
            assert list(order.forget.namespaces) == [namespace("tenant")]
            assert not order.forget.everything
            await peer.step(forgotten=order.forget.number)
        assert (await clearing).num_unconfirmed_workers == 0


async def test_a_worker_that_ends_its_stream_meanwhile_is_not_waited_for() -> None:
    async with started() as client:
        peer, _ = await keeper(client)
        clearing = asyncio.ensure_future(client.admin.Clear(CLEAR))
        await peer.receive()
        await peer.hang_up()
        assert (await clearing).num_unconfirmed_workers == 1


async def test_a_worker_that_is_away_is_counted_and_told_in_its_welcome() -> None:
    async with started() as client:
        peer, welcome = await keeper(client)
        assert not welcome.HasField("forget")
        await peer.hang_up()
        await until(lambda: not client.manager.workers["w1"].connected)
        assert (await client.admin.Clear(CLEAR)).num_unconfirmed_workers == 1
        peer, again = await keeper(client, generation=welcome.generation)
        assert again.generation == welcome.generation
        assert list(again.forget.namespaces) == [namespace("tenant")]
        await peer.step(forgotten=again.forget.number)
        assert (await client.admin.Clear(cache_pb2.ClearRequest(dry_run=True))).num_unconfirmed_workers == 0
        assert client.manager.unconfirmed() == ()


async def test_a_worker_that_does_not_confirm_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "FORGET_TIMEOUT_S", 0.05)
    async with started() as client:
        await keeper(client)
        assert (await client.admin.Clear(CLEAR)).num_unconfirmed_workers == 1


async def test_an_inventory_over_the_wire_is_counted_and_bad_runs_are_named() -> None:
    async with started() as client:
        peer, _ = await keeper(client)
        bad = full_run()
        bad.run, bad.tokens = 2, b"12345"
        inventory = cache_pb2.Inventory(runs=[full_run(), bad], is_complete=True)
        reply = await peer.step(inventory=inventory)
        (refused,) = reply.run_refusals
        assert (refused.run, refused.field) == (2, "step.inventory.runs[1].tokens")
        (stats,) = (await client.stub.Stats(cache_pb2.StatsRequest())).workers
        assert (stats.restored_pages, stats.restored_tokens) == (2, 32)
        assert (await peer.step(publishes=[publish(9, 1)], releases=[release(9)])).refusals  # the stream goes on
