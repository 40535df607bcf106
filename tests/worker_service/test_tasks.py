"""Tasks beside the engine's loop: one that fails ends the worker, with its error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from protos.v1 import cache_pb2
from register_qa import MODEL_FOLDER
from session.messages import Step
from session.words import TicketId, Transfer
from tests.worker_service.engine_harness import collect, running_engine
from tests.worker_service.scripted_manager import order, session, welcoming
from worker_service import bootstrap, session_stream
from worker_service.compute import prepare
from worker_service.config import WorkerConfig
from worker_service.core.errors import WorkerStopped
from worker_service.tasks import watched
from worker_service.tier_watch import TierWatch


class Unexpected(Exception):
    """No error that anything here knows."""


async def fails(*_: object) -> None:
    raise Unexpected("unexpected")


async def waits() -> None:
    await asyncio.Event().wait()


async def test_a_failure_is_told_and_logged_and_an_end_is_not(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    waiting = watched(waits(), "waits", told.append)
    ending = watched(asyncio.sleep(0), "ends", told.append)
    failing = watched(fails(), "fails", told.append)
    await asyncio.wait({ending, failing})
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0)
    assert [str(error) for error in told] == ["unexpected"]
    assert "the task fails has failed" in caplog.text and "the task ends" not in caplog.text


@pytest.mark.parametrize("is_idle", [True, False])
async def test_an_order_that_cannot_be_followed_ends_the_engine(is_idle: bool) -> None:
    async with running_engine() as harness:
        await harness.engine.connected.wait()

        def spill(transfer: Transfer) -> None:
            raise Unexpected("unexpected")

        harness.mover.spill = spill  # type: ignore[method-assign]
        asked = None if is_idle else harness.ask([1] * 9, 100)
        await harness.cache.orders.put(Transfer(TicketId(1), (), 0, 0))
        async with asyncio.timeout(20):
            with pytest.raises(Unexpected):
                await harness.task
        assert isinstance(harness.engine.fault, Unexpected)
        if asked is not None:
            with pytest.raises(WorkerStopped, match="Unexpected"):
                await collect(asked)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_readers_error_is_raised_by_every_waiting_call(monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    def decode(message: cache_pb2.Order) -> Transfer:
        raise Unexpected("unexpected")

    async def sends_an_order(requests, context) -> None:
        await welcoming(requests, context)
        if asks:
            await anext(requests)
        await context.write(order(1))
        await anext(requests, None)

    monkeypatch.setattr(session_stream, "decode_order", decode)
    async with session(sends_an_order) as (client, _):
        await client.connect(0)
        async with asyncio.timeout(20):
            with pytest.raises(Unexpected):
                await (client.step(Step(1)) if asks else client.next_order())


def no_tier_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierWatch, "run", fails)


def no_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "follow_health", fails)


@pytest.mark.parametrize("break_one", [no_tier_watch, no_health])
async def test_a_worker_ends_with_the_tasks_beside_its_engine(
    monkeypatch: pytest.MonkeyPatch, break_one: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_one(monkeypatch)
    nowhere = {"cache": "127.0.0.1:1", "listen": "127.0.0.1:0", "admin_listen": ""}
    config = WorkerConfig(str(MODEL_FOLDER), **nowhere, device="cpu", threads=1, pool_mb=64, page_tokens=16)  # type: ignore[arg-type]
    async with bootstrap.running(config, prepare(config)) as service:
        async with asyncio.timeout(20):
            with pytest.raises(Unexpected):
                await service.running
        assert service.engine.draining.is_set()
