"""Sessions that break while requests run: at every step, before it arrived or after, and with the manager gone."""

from __future__ import annotations

import asyncio
import random
import threading
from array import array
from dataclasses import replace

import grpc
import pytest

from session.messages import Step
from session.words import TicketId, Transfer
from tests.worker_service.audited_manager import AuditedManager
from tests.worker_service.engine_harness import EngineHarness, collect, reference, running_engine
from worker_service.core.errors import (
    InvalidField,
    SessionLost,
    SessionRefused,
    StepRejected,
    StepsRejected,
    Unservable,
    WorkerStopped,
)
from worker_service.core.sequence import FinishReason
from worker_service.serving.servicer import CODES
from worker_service.session_retries import MAX_BEGINNINGS, REJECTIONS_OF_A_STEP

LENGTHS = (5, 30, 11, 22, 8)
# Enough for a dozen steps.
NUM_TOKENS = 50


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [draw.choices(range(26), k=length) for length in LENGTHS]


async def check_answers(harness: EngineHarness, disturb: asyncio.Task[None] | None = None) -> None:
    pieces = await asyncio.gather(*(collect(harness.ask(prompt, NUM_TOKENS)) for prompt in prompts()))
    if disturb is not None:
        await disturb
    for prompt, piece in zip(prompts(), pieces, strict=True):
        assert piece.token_ids == reference(prompt, NUM_TOKENS)
    await harness.settled()


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("where", ["lose_before", "lose_after"])
async def test_a_session_that_breaks_at_any_step_loses_no_request(where: str, number: int) -> None:
    async with running_engine() as harness:
        setattr(harness.cache, where, number)
        await check_answers(harness)
        assert harness.cache.num_hellos == 2
        assert harness.cache.manager.adopted == []


@pytest.mark.parametrize("number", range(1, 12))
async def test_live_requests_are_adopted_by_a_new_manager(number: int) -> None:
    async with running_engine() as harness:
        before = harness.cache.manager
        harness.cache.on_step = lambda step: harness.cache.restart() if step.step_id == number + 1 else None

        def on_step(step: object) -> None:
            if harness.cache.manager is before and len(harness.cache.steps) == number:
                harness.cache.restart()
                raise SessionLost("that manager is gone")

        harness.cache.on_step = on_step
        await check_answers(harness)
        assert harness.cache.manager is not before
        assert harness.cache.num_hellos == 2
        if number > 3:
            assert harness.cache.manager.adopted, "everything started anew"


async def test_an_answer_ends_where_a_new_manager_has_smaller_limits() -> None:
    async with running_engine() as harness:
        cache, most = harness.cache, 30

        def on_step(step: Step) -> None:
            old = cache.manager
            if len(cache.steps) == 25:
                limits = old.limits._replace(max_sequence_tokens=most)
                cache.manager = AuditedManager(old.groups, old.page_tokens, "epoch-2", limits=limits)
                raise SessionLost("that manager is gone")

        cache.on_step = on_step
        prompt = prompts()[0]
        whole, short = await asyncio.gather(collect(harness.ask(prompt, 150)), collect(harness.ask([5] * 3, 26)))
        assert whole.finish_reason is FinishReason.LENGTH and whole.usage is not None
        assert most <= len(prompt) + len(whole.token_ids) < 150
        assert whole.token_ids == reference(prompt, len(whole.token_ids))
        assert whole.usage.generated_tokens == len(whole.token_ids)
        assert short.token_ids == reference([5] * 3, 26)
        with pytest.raises(InvalidField, match="max_sequence_tokens = 30"):
            harness.ask([1] * most)


async def test_requests_wait_while_nobody_answers_and_run_then() -> None:
    async with running_engine() as harness:
        await harness.engine.connected.wait()
        harness.cache.is_up.clear()
        harness.cache.restart()
        running = asyncio.create_task(check_answers(harness))
        await asyncio.sleep(0.05)
        assert not running.done()
        assert harness.engine.epoch is None
        harness.cache.is_up.set()
        await running
        assert harness.engine.epoch == "epoch-2"


async def test_an_idle_worker_connects_again_when_its_session_ends() -> None:
    async with running_engine() as harness:
        await harness.engine.connected.wait()
        harness.cache.restart()
        await harness.cache.orders.put(SessionLost("the stream ended"))
        async with asyncio.timeout(20):
            while harness.engine.epoch != "epoch-2":
                await asyncio.sleep(0.001)


async def test_launches_go_on_while_hello_is_on_its_way_and_have_ended_when_the_welcome_is_followed() -> None:
    async with running_engine() as harness:
        cache, runner = harness.cache, harness.runner
        runner.gate = threading.Event()
        request = asyncio.create_task(collect(harness.ask(prompts()[0], 20)))
        await asyncio.to_thread(runner.entered.wait, 20)
        cache.is_up.clear()
        harness.engine.reconnect_soon()
        while not cache.is_hung_up:
            await asyncio.sleep(0.001)
        runner.gate.set()
        # The prompt's two pages have slots for three tokens more.
        while runner.num_launches < 4:
            await asyncio.sleep(0.001)
        assert cache.num_hellos == 1
        cache.is_up.set()
        other = asyncio.create_task(collect(harness.ask(prompts()[1], 4)))
        assert (await request).token_ids == reference(prompts()[0], 20)
        assert (await other).token_ids == reference(prompts()[1], 4)
        assert cache.num_hellos == 2


async def test_steps_that_end_every_session_end_the_worker_not_the_world() -> None:
    async with running_engine() as harness:

        def refuse(step: object) -> None:
            raise StepRejected("INVALID_ARGUMENT: step.step_id: no")

        harness.cache.on_step = refuse
        asked = [harness.ask([number] * 3) for number in range(6)]
        with pytest.raises(StepsRejected, match=r"step.step_id"):
            await harness.task
        for stream in asked:
            with pytest.raises((WorkerStopped, Unservable)):
                await collect(stream)
        assert harness.cache.num_hellos == REJECTIONS_OF_A_STEP * MAX_BEGINNINGS


async def test_a_request_whose_step_ends_every_session_fails_alone() -> None:
    async with running_engine() as harness:
        runs = harness.ask(prompts()[0], 60)
        await runs.next_piece()
        bad = prompts()[1]

        def refuse(step: Step) -> None:
            if any(array("i", acquire.tokens).tolist() == bad for acquire in step.acquires):
                raise StepRejected("INVALID_ARGUMENT: step: no")

        harness.cache.on_step = refuse
        culprit, waits = harness.ask(bad, 5), harness.ask(prompts()[2], 5)
        with pytest.raises(Unservable, match="rejects it"):
            await collect(culprit)
        assert (await collect(waits)).token_ids == reference(prompts()[2], 5)
        assert (await collect(runs)).finish_reason is not None
        await harness.settled()


@pytest.mark.parametrize("lost", [SessionLost("UNAVAILABLE"), StepRejected("INTERNAL")])
async def test_a_link_that_breaks_again_and_again_costs_time_only(lost: SessionLost) -> None:
    async with running_engine() as harness:
        draw = random.Random(2)

        def break_often(step: object) -> None:
            if draw.random() < 0.3:
                raise lost

        harness.cache.on_step = break_often
        await check_answers(harness)


async def test_a_worker_that_was_replaced_says_so_to_its_clients() -> None:
    """Its requests are as good on another worker: a code that clients try again."""
    async with running_engine() as harness:
        asked = harness.ask(prompts()[0], 60)
        await asked.next_piece()

        async def connect(generation: int) -> None:
            raise SessionRefused("ABORTED: a newer incarnation of w took over")

        harness.cache.connect = connect  # type: ignore[assignment, method-assign]
        harness.engine.reconnect_soon()
        with pytest.raises(SessionRefused):
            await harness.task
        with pytest.raises(WorkerStopped, match="SessionRefused") as stopped:
            await collect(asked)
        assert CODES[type(stopped.value)] is grpc.StatusCode.UNAVAILABLE


async def test_an_invalid_request_fails_alone_with_the_service_s_words() -> None:
    async with running_engine() as harness:
        await harness.engine.connected.wait()
        cache = harness.cache.manager.cache
        cache.config = replace(cache.config, max_sequence_tokens=20)  # less than its Welcome said
        bad, good = harness.ask(prompts()[1], 5), harness.ask(prompts()[0], 5)
        with pytest.raises(Unservable, match=r"tokens: 30 tokens.*20"):
            await collect(bad)
        assert (await collect(good)).token_ids == reference(prompts()[0], 5)
        await harness.settled()


async def test_no_order_starts_between_the_drain_and_the_hello() -> None:
    """Hello gives the pages of an open order to others: a transfer that reads them later writes another's content."""
    async with running_engine() as harness:
        await harness.engine.connected.wait()
        late: list[int] = []
        drain, spill, connect = harness.mover.drain, harness.mover.spill, harness.cache.connect
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

        harness.mover.drain, harness.mover.spill = note_drain, note_spill  # type: ignore[method-assign]
        harness.cache.connect = note_connect  # type: ignore[method-assign]
        num_sent = 0
        for _ in range(100):
            for _ in range(5):
                num_sent += 1
                if not harness.cache.is_hung_up:
                    await harness.cache.orders.put(Transfer(TicketId(num_sent), (), 0, 0))
            harness.engine.reconnect_soon()
            for _ in range(draw_turns(num_sent)):
                await asyncio.sleep(0)
        assert harness.mover.orders
        assert harness.cache.num_hellos > 20
        assert late == []


def draw_turns(seed: int) -> int:
    return random.Random(seed).randrange(12)


async def test_a_worker_that_is_stopped_while_nobody_answers_ends() -> None:
    async with running_engine() as harness:
        harness.cache.is_up.clear()
        stream = harness.ask([1, 2, 3])
        await asyncio.sleep(0)
        result = await harness.engine.drain(0)
        harness.engine.stop()
        await asyncio.wait_for(harness.task, 20)
        assert result.num_aborted == 1
        assert stream.is_finished
