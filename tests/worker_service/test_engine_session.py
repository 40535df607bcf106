"""Sessions that break while requests run: at every step, before it arrived or after, and with the manager gone."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from tests.worker_service.engine_desk import Desk, collect, open_desk, reference
from worker_service.core.ports import SessionLost
from worker_service.engine import MAX_LOST_OVER_ONE_STEP
from worker_service.generation import RequestFailed

LENGTHS = (5, 30, 11, 22, 8)


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [draw.choices(range(26), k=length) for length in LENGTHS]


async def check_answers(desk: Desk, disturb: asyncio.Task[None] | None = None) -> None:
    pieces = await asyncio.gather(*(collect(desk.ask(prompt, 12)) for prompt in prompts()))
    if disturb is not None:
        await disturb
    for prompt, piece in zip(prompts(), pieces, strict=True):
        assert piece.token_ids == reference(prompt, 12)
    await desk.settled()


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("where", ["lose_before", "lose_after"])
async def test_a_session_that_breaks_at_any_step_loses_no_request(where: str, number: int) -> None:
    async with open_desk() as desk:
        setattr(desk.cache, where, number)
        await check_answers(desk)
        assert desk.cache.num_hellos == 2
        assert desk.cache.adopted == []


@pytest.mark.parametrize("number", range(1, 12))
async def test_live_requests_are_adopted_by_a_new_manager(number: int) -> None:
    async with open_desk() as desk:
        before = desk.cache.manager
        desk.cache.on_step = lambda step: desk.cache.restart() if step.step_id == number + 1 else None

        def on_step(step: object) -> None:
            if desk.cache.manager is before and len(desk.cache.steps) == number:
                desk.cache.restart()
                raise SessionLost("that manager is gone")

        desk.cache.on_step = on_step
        await check_answers(desk)
        assert desk.cache.manager is not before
        assert desk.cache.num_hellos == 2
        if number > 3:
            assert desk.cache.adopted, "everything started anew"


async def test_requests_wait_while_nobody_answers_and_run_then() -> None:
    async with open_desk() as desk:
        await desk.engine.connected.wait()
        desk.cache.is_up.clear()
        desk.cache.restart()
        running = asyncio.create_task(check_answers(desk))
        await asyncio.sleep(0.05)
        assert not running.done()
        assert desk.engine.epoch == ""
        desk.cache.is_up.set()
        await running
        assert desk.engine.epoch == "epoch-2"


async def test_an_idle_worker_connects_again_when_its_session_ends() -> None:
    async with open_desk() as desk:
        await desk.engine.connected.wait()
        desk.cache.restart()
        await desk.cache.orders.put(SessionLost("the stream ended"))
        async with asyncio.timeout(20):
            while desk.engine.epoch != "epoch-2":
                await asyncio.sleep(0.001)


async def test_the_launch_in_flight_has_ended_before_hello() -> None:
    async with open_desk() as desk:
        desk.runner.gate = threading.Event()
        request = asyncio.create_task(collect(desk.ask(prompts()[0], 4)))
        await asyncio.to_thread(desk.runner.entered.wait, 20)
        desk.engine.say_hello_again()
        other = asyncio.create_task(collect(desk.ask(prompts()[1], 4)))
        await asyncio.sleep(0.02)
        assert desk.cache.num_hellos == 1
        desk.runner.gate.set()
        assert (await request).token_ids == reference(prompts()[0], 4)
        assert (await other).token_ids == reference(prompts()[1], 4)
        assert desk.cache.num_hellos == 2


async def test_a_step_that_ends_every_session_ends_the_worker_not_the_world() -> None:
    async with open_desk() as desk:

        def refuse(step: object) -> None:
            raise SessionLost("INVALID_ARGUMENT: step.acquires[0]: no")

        desk.cache.on_step = refuse
        generation = desk.ask([1, 2, 3])
        with pytest.raises(RequestFailed):
            await collect(generation)
        with pytest.raises(RequestFailed, match=r"step.acquires\[0\]"):
            await desk.task
        assert desk.cache.num_hellos == MAX_LOST_OVER_ONE_STEP + 1


async def test_a_worker_that_is_stopped_while_nobody_answers_ends() -> None:
    async with open_desk() as desk:
        desk.cache.is_up.clear()
        generation = desk.ask([1, 2, 3])
        await asyncio.sleep(0)
        result = await desk.engine.drain(0)
        desk.engine.stop()
        await asyncio.wait_for(desk.task, 20)
        assert result.num_aborted == 1
        assert generation.is_finished
