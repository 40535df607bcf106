"""Sessions that break while requests run: at every step, before it arrived or after, and with the manager gone."""

from __future__ import annotations

import asyncio
import random
import threading
from array import array

import grpc
import pytest

from session.messages import Step
from session.words import TicketId, Transfer
from tests.worker_service.engine_desk import Desk, collect, open_desk, reference
from worker_service.core.ports import SessionLost, SessionRefused, StepRejected
from worker_service.generation import RequestFailed, Unservable, WorkerStopped
from worker_service.losses import MAX_BEGINNINGS, REJECTIONS_OF_A_STEP
from worker_service.servicer import CODES

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
        assert desk.cache.manager.adopted == []


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
            assert desk.cache.manager.adopted, "everything started anew"


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


async def test_steps_that_end_every_session_end_the_worker_not_the_world() -> None:
    async with open_desk() as desk:

        def refuse(step: object) -> None:
            raise StepRejected("INVALID_ARGUMENT: step.step_id: no")

        desk.cache.on_step = refuse
        asked = [desk.ask([number] * 3) for number in range(6)]
        with pytest.raises(RequestFailed, match=r"step.step_id"):
            await desk.task
        for generation in asked:
            with pytest.raises((WorkerStopped, Unservable)):
                await collect(generation)
        assert desk.cache.num_hellos == REJECTIONS_OF_A_STEP * MAX_BEGINNINGS


async def test_a_request_whose_step_ends_every_session_fails_alone() -> None:
    async with open_desk() as desk:
        runs = desk.ask(prompts()[0], 60)
        await runs.next_piece()
        bad = prompts()[1]

        def refuse(step: Step) -> None:
            if any(array("i", acquire.tokens).tolist() == bad for acquire in step.acquires):
                raise StepRejected("INVALID_ARGUMENT: step: no")

        desk.cache.on_step = refuse
        culprit, waits = desk.ask(bad, 5), desk.ask(prompts()[2], 5)
        with pytest.raises(Unservable, match="rejects it"):
            await collect(culprit)
        assert (await collect(waits)).token_ids == reference(prompts()[2], 5)
        assert (await collect(runs)).finish_reason is not None
        await desk.settled()


@pytest.mark.parametrize("lost", [SessionLost("UNAVAILABLE"), StepRejected("INTERNAL")])
async def test_a_link_that_breaks_again_and_again_costs_time_only(lost: SessionLost) -> None:
    async with open_desk() as desk:
        draw = random.Random(2)

        def break_often(step: object) -> None:
            if draw.random() < 0.3:
                raise lost

        desk.cache.on_step = break_often
        await check_answers(desk)


async def test_a_worker_that_was_replaced_says_so_to_its_clients() -> None:
    """Its requests are as good on another worker: a code that clients try again."""
    async with open_desk() as desk:
        asked = desk.ask(prompts()[0], 60)
        await asked.next_piece()

        async def connect(generation: int) -> None:
            raise SessionRefused("ABORTED: a newer incarnation of w took over")

        desk.cache.connect = connect  # type: ignore[assignment, method-assign]
        desk.engine.say_hello_again()
        with pytest.raises(SessionRefused):
            await desk.task
        with pytest.raises(WorkerStopped, match="SessionRefused") as stopped:
            await collect(asked)
        assert CODES[type(stopped.value)] is grpc.StatusCode.UNAVAILABLE


async def test_an_invalid_request_fails_alone_with_the_service_s_words() -> None:
    async with open_desk() as desk:
        await desk.engine.connected.wait()
        desk.cache.manager.limits = desk.cache.manager.limits._replace(max_sequence_tokens=20)
        bad, good = desk.ask(prompts()[1], 5), desk.ask(prompts()[0], 5)
        with pytest.raises(Unservable, match="tokens: does not fit"):
            await collect(bad)
        assert (await collect(good)).token_ids == reference(prompts()[0], 5)
        await desk.settled()


async def test_no_order_starts_between_the_drain_and_the_hello() -> None:
    """Hello gives the pages of an open order to others: a transfer that reads them later writes another's content."""
    async with open_desk() as desk:
        await desk.engine.connected.wait()
        late: list[int] = []
        drain, spill, connect = desk.mover.drain, desk.mover.spill, desk.cache.connect
        drained = False

        async def note_drain() -> None:
            nonlocal drained
            await drain()
            drained = True

        async def note_connect(generation: int):
            nonlocal drained
            await asyncio.sleep(0)
            welcome = await connect(generation)
            drained = False
            return welcome

        def note_spill(transfer: Transfer) -> None:
            if drained:
                late.append(transfer.ticket)
            spill(transfer)

        desk.mover.drain, desk.mover.spill = note_drain, note_spill  # type: ignore[method-assign]
        desk.cache.connect = note_connect  # type: ignore[method-assign]
        num_sent = 0
        for _ in range(100):
            for _ in range(5):
                num_sent += 1
                if not desk.cache.is_hung_up:
                    await desk.cache.orders.put(Transfer(TicketId(num_sent), (), 0, 0))
            desk.engine.say_hello_again()
            for _ in range(draw_turns(num_sent)):
                await asyncio.sleep(0)
        assert desk.mover.orders
        assert desk.cache.num_hellos > 20
        assert late == []


def draw_turns(seed: int) -> int:
    return random.Random(seed).randrange(12)


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
