"""The engine's loop on fakes: answers, overlap, aborts, failed launches, and what callers are told."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from array import array

import pytest

from session.messages import Step, StepReply
from session.words import MissReason, TicketId, Transfer, TransferPages
from tests.worker_service.engine_harness import Letters, collect, reference, running_engine
from worker_service.core.batch import Batch
from worker_service.core.errors import (
    DeviceLost,
    Draining,
    InvalidField,
    QueueFull,
    RequestFailed,
    Unservable,
    WorkerStopped,
)
from worker_service.core.sequence import FinishReason, Usage


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(26), k=length)


async def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async with running_engine(num_pages=40) as harness:
        prompts = [prompt_of(seed % 5, 5 + 3 * seed) for seed in range(12)]
        pieces = await asyncio.gather(*(collect(harness.ask(prompt, 6)) for prompt in prompts))
        for prompt, piece in zip(prompts, pieces, strict=True):
            assert piece.token_ids == reference(prompt, 6)
            assert piece.text == Letters().add(piece.token_ids)
            assert piece.finish_reason is FinishReason.LENGTH
            usage = piece.usage
            assert usage is not None
            assert usage.generated_tokens == 6
            if not usage.num_preemptions:
                assert usage.cached_tokens + usage.fetched_tokens + usage.computed_tokens == len(prompt)
        await harness.settled()


async def test_launches_that_end_at_once_leave_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many passes with something to do as a long answer has launches: sockets are served between them."""
    async with running_engine() as harness:
        passes, original, turns = 0, harness.engine._loop._pass, 0

        def busy() -> bool:
            nonlocal passes
            passes += 1
            return original() or passes < 400

        monkeypatch.setattr(harness.engine._loop, "_pass", busy)
        harness.ask(prompt_of(3, 5), 2)
        while passes < 400:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 399


async def test_a_repeated_prompt_computes_only_what_is_not_cached() -> None:
    async with running_engine() as harness:
        prompt = prompt_of(1, 22)
        first, second = await collect(harness.ask(prompt)), await collect(harness.ask(prompt))
        assert first.usage == Usage(22, 0, 0, 22, 8, 0, 0, 0, "", MissReason.NEVER_SEEN)
        assert second.usage == Usage(22, 20, 0, 2, 8, 0, 20, 20, "", MissReason.PAGE_TAIL)
        assert second.token_ids == first.token_ids


async def test_equal_prompts_at_once_cost_one_prefill() -> None:
    async with running_engine() as harness:
        prompt = prompt_of(2, 41)
        pieces = await asyncio.gather(*(collect(harness.ask(prompt, 2)) for _ in range(8)))
        assert [piece.usage.computed_tokens for piece in pieces if piece.usage] == [41] + [1] * 7
        assert all(piece.token_ids == reference(prompt, 2) for piece in pieces)


async def test_the_next_step_is_answered_while_a_launch_runs() -> None:
    async with running_engine() as harness:
        harness.runner.gate = threading.Event()
        steps_in_flight: list[Step] = []

        def on_step(step: Step) -> None:
            if harness.runner.entered.is_set() and harness.runner.num_launches == 0:
                steps_in_flight.append(step)

        harness.cache.on_step = on_step
        first = asyncio.create_task(collect(harness.ask(prompt_of(3, 7), 3)))
        await asyncio.to_thread(harness.runner.entered.wait, 20)
        second = asyncio.create_task(collect(harness.ask(prompt_of(4, 7), 3)))
        while not any(step.acquires for step in steps_in_flight):
            await asyncio.sleep(0.001)
        assert harness.runner.num_launches == 0, "the launch ended before the second request was granted"
        harness.runner.gate.set()
        assert (await first).token_ids == reference(prompt_of(3, 7), 3)
        assert (await second).token_ids == reference(prompt_of(4, 7), 3)
        spans = harness.engine.trace.spans()
        steps = [span for span in spans if span.track == "step"]
        launches = [span for span in spans if span.track == "launch"]
        assert any(s.start_s < run.end_s and run.start_s < s.end_s for s in steps for run in launches)


async def test_a_failed_launch_fails_its_requests_only_and_publishes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with running_engine() as harness:
        bad = prompt_of(5, 23)
        harness.runner.fail_when = lambda batch: batch.num_seqs == 1 and list(batch.token_ids) == bad[16:]
        failing = harness.ask(bad)
        with pytest.raises(RequestFailed, match="RuntimeError"):
            await collect(failing)
        await harness.settled()
        published = [publish.computed_tokens for step in harness.cache.steps for publish in step.publishes]
        assert published == [16], "the failed launch was published, or the one before it was not"
        assert (await collect(harness.ask(prompt_of(6, 23)))).token_ids == reference(prompt_of(6, 23), 8)
        harness.runner.fail_when = lambda batch: False
        again = await collect(harness.ask(bad))
        assert again.token_ids == reference(bad, 8)
        assert again.usage is not None and again.usage.cached_tokens == 16
        assert "launch" in caplog.text


async def test_a_lost_device_ends_the_engine_and_every_request() -> None:
    async with running_engine() as harness:

        def lose(batch: Batch) -> bool:
            raise DeviceLost("unspecified launch failure")

        harness.runner.fail_when = lose
        streams = [harness.ask(prompt_of(seed, 30)) for seed in range(3)]
        for stream in streams:
            with pytest.raises(WorkerStopped):
                await collect(stream)
        with pytest.raises(DeviceLost):
            await harness.task
        assert isinstance(harness.engine.fault, DeviceLost)
        assert harness.engine.draining.is_set()


async def test_a_row_that_cannot_be_computed_fails_alone_and_the_others_get_their_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_engine(token_budget=128) as harness:
        harness.runner.gate = threading.Event()
        bad = prompt_of(5, 12)
        harness.runner.fail_when = lambda batch: any(entry.sampling.seed == 666 for entry in batch.sampled)
        prompts = [prompt_of(seed, 9 + seed) for seed in range(20, 26)]
        bystanders = [harness.ask(prompt, 12) for prompt in prompts[:3]]
        culprit = harness.ask(bad, 12, seed=666)
        bystanders += [harness.ask(prompt, 12) for prompt in prompts[3:]]
        harness.runner.gate.set()
        pieces = await asyncio.gather(*(collect(bystander) for bystander in bystanders))
        with pytest.raises(RequestFailed, match="RuntimeError"):
            await collect(culprit)
        assert [piece.token_ids for piece in pieces] == [reference(prompt, 12) for prompt in prompts]
        assert re.search(r"1 of its [2-7] rows failed", caplog.text)
        await harness.settled()


async def test_a_launch_that_never_returns_stops_the_worker() -> None:
    async with running_engine(launch_timeout_s=0.2) as harness:
        harness.runner.gate = threading.Event()
        stream = harness.ask(prompt_of(1, 9))
        with pytest.raises(WorkerStopped):
            await collect(stream)
        async with asyncio.timeout(10):
            with pytest.raises(DeviceLost, match="did not return"):
                await harness.task


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_an_abort_frees_everything_at_every_stage(num_tokens: int) -> None:
    async with running_engine() as harness:
        stream = harness.ask(prompt_of(7, 30), 100)
        seen = 0
        while seen < num_tokens:
            seen += len((await stream.next_piece()).token_ids)
        harness.engine.abort(stream)
        harness.engine.abort(stream)
        await harness.settled()
        assert not harness.engine.num_unfinished
        after = await collect(harness.ask(prompt_of(7, 30), 4))
        assert after.token_ids == reference(prompt_of(7, 30), 4)


async def test_an_abort_while_the_launch_runs_drops_its_tokens() -> None:
    async with running_engine() as harness:
        harness.runner.gate = threading.Event()
        stream = harness.ask(prompt_of(8, 9), 4)
        await asyncio.to_thread(harness.runner.entered.wait, 20)
        harness.engine.abort(stream)
        harness.runner.gate.set()
        await harness.settled()


async def test_a_stop_string_ends_the_text_before_it_and_frees_the_lease() -> None:
    async with running_engine() as harness:
        prompt = prompt_of(9, 10)
        text = Letters().add(reference(prompt, 30))
        stop = text[11:14]
        cut = text.index(stop)
        piece = await collect(harness.ask(prompt, 30, stop=("never!", stop)))
        assert piece.text == text[:cut]
        assert piece.finish_reason is FinishReason.STOP
        assert piece.usage is not None and piece.usage.generated_tokens == cut + 3
        assert len(piece.token_ids) == cut + 3
        await harness.settled()


async def test_a_stop_token_ends_the_answer() -> None:
    async with running_engine() as harness:
        prompt = prompt_of(10, 10)
        tokens = reference(prompt, 30)
        stop = tokens[5]
        piece = await collect(harness.ask(prompt, 30, stop_token_ids=frozenset({stop})))
        assert piece.token_ids == tokens[: tokens.index(stop) + 1]
        assert piece.finish_reason is FinishReason.STOP


async def test_a_prompt_that_can_never_fit_is_an_error_and_others_go_on() -> None:
    async with running_engine(num_pages=10) as harness:
        too_long, fits = harness.ask(prompt_of(11, 44)), harness.ask(prompt_of(12, 12))
        with pytest.raises(Unservable, match="44 tokens take 11 pages"):
            await collect(too_long)
        assert (await collect(fits)).token_ids == reference(prompt_of(12, 12), 8)


async def test_bad_or_too_many_requests_are_refused_at_once() -> None:
    async with running_engine(max_waiting=2) as harness:
        harness.cache.is_up.clear()
        with pytest.raises(InvalidField, match="prompt"):
            harness.ask([99])
        waiting = [harness.ask([1, 2, 3]) for _ in range(2)]
        with pytest.raises(QueueFull):
            harness.ask([1, 2, 3])
        harness.cache.is_up.set()
        for stream in waiting:
            assert (await collect(stream)).token_ids == reference([1, 2, 3], 8)


async def test_tight_pools_preempt_and_everybody_finishes() -> None:
    async with running_engine(num_pages=12) as harness:
        prompts = [prompt_of(20 + seed, 9) for seed in range(6)]
        pieces = await asyncio.gather(*(collect(harness.ask(prompt, 20)) for prompt in prompts))
        assert [piece.token_ids for piece in pieces] == [reference(prompt, 20) for prompt in prompts]
        assert sum(piece.usage.num_preemptions for piece in pieces if piece.usage) > 0
        await harness.settled()


async def test_a_spill_order_is_carried_out_and_acknowledged_by_an_idle_engine() -> None:
    async with running_engine() as harness:
        order = Transfer(TicketId(5), (TransferPages(0, array("I", [1]).tobytes(), "key:", bytes(32)),), 0, 1)
        await harness.engine.connected.wait()
        await harness.cache.orders.put(order)
        async with asyncio.timeout(20):
            while not harness.cache.acks:
                await asyncio.sleep(0.001)
        assert harness.mover.orders == [order]
        assert harness.cache.acks[0].ticket == 5


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_a_fetch_that_fails_at_once_is_recomputed_or_forgotten(is_aborted: bool) -> None:
    """The abort comes while the acquire is on its way: its grant and the ack of its fetch both find nobody waiting."""
    async with running_engine(num_pages=40, host=True) as harness:
        prompt = prompt_of(17, 14)
        await collect(harness.ask(prompt, 1))
        await harness.settled()
        await collect(harness.ask(prompt_of(19, 150), 8))  # pushes the prompt's pages out of the device
        await harness.settled()
        # A launch in flight keeps the loop from its next step until the ack is there.
        harness.runner.entered.clear()
        other = asyncio.create_task(collect(harness.ask(prompt_of(18, 9), 100)))
        await asyncio.to_thread(harness.runner.entered.wait, 20)
        stream = harness.ask(prompt)
        if is_aborted:
            harness.cache.on_step = lambda step: harness.engine.abort(stream) if step.acquires else None
        else:
            piece = await collect(stream)
            assert piece.token_ids == reference(prompt, 8)
        assert (await other).token_ids == reference(prompt_of(18, 9), 100)
        await harness.settled()
        assert len(harness.mover.fetches) == 1
        assert not harness.cache.manager.cache.transfers.fetches


async def test_drain_waits_for_running_requests_and_takes_no_new_ones() -> None:
    async with running_engine() as harness:
        running = asyncio.create_task(collect(harness.ask(prompt_of(13, 9), 20)))
        await asyncio.sleep(0)
        draining = asyncio.create_task(harness.engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            harness.ask([1, 2])
        assert (await draining) == (1, 0)
        assert (await running).token_ids == reference(prompt_of(13, 9), 20)


async def test_drain_aborts_what_is_left_after_its_time() -> None:
    async with running_engine() as harness:
        harness.runner.gate = threading.Event()
        stream = harness.ask(prompt_of(14, 9), 20)
        await asyncio.to_thread(harness.runner.entered.wait, 20)
        assert await harness.engine.drain(0) == (0, 1)
        with pytest.raises(Draining):
            await collect(stream)
        harness.runner.gate.set()
        await harness.settled()


async def test_the_end_releases_what_is_held_and_says_goodbye() -> None:
    async with running_engine() as harness:
        stream = harness.ask(prompt_of(15, 9), 100)
        await stream.next_piece()
        harness.engine.abort(stream)
        harness.engine.stop()
        await harness.task
        assert harness.cache.said_goodbye
        assert harness.cache.manager.is_idle


async def test_a_slow_reader_gets_longer_pieces_not_more() -> None:
    async with running_engine() as harness:
        stream = harness.ask(prompt_of(16, 9), 12)
        await harness.settled()
        piece = await stream.next_piece()
        assert piece.token_ids == reference(prompt_of(16, 9), 12)
        assert piece.finish_reason is FinishReason.LENGTH


async def test_sequence_ids_are_never_used_again() -> None:
    """The lease of an aborted request may still be open when the next one comes."""
    async with running_engine() as harness:
        streams = [harness.ask([seed]) for seed in range(4)]
        for stream in streams:
            harness.engine.abort(stream)
        streams += [harness.ask([seed]) for seed in range(4)]
        assert len({stream.sequence_id for stream in streams}) == 8


@pytest.mark.parametrize("ahead", [0, 24])
async def test_streams_that_have_pages_go_on_while_no_step_is_answered(ahead: int) -> None:
    async with running_engine(decode_ahead_tokens=ahead) as harness:
        answer_steps, step = asyncio.Event(), harness.cache.step
        answer_steps.set()

        async def hang(message: Step) -> StepReply:
            await answer_steps.wait()
            return await step(message)

        harness.cache.step = hang  # type: ignore[method-assign]
        stream = harness.ask(prompt_of(13, 9), 60)
        seen = len((await stream.next_piece()).token_ids)
        gate = harness.runner.gate = threading.Event()
        await asyncio.sleep(0.02)  # what the last launches asked for is answered
        answer_steps.clear()
        before = harness.runner.num_launches
        gate.set()
        async with asyncio.timeout(20):
            while harness.runner.num_launches < before + ahead // 3:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        # Without pages ahead no more than the rest of the page that was begun, and what was in flight.
        assert ahead or harness.runner.num_launches <= before + 4 + 2
        answer_steps.set()
        rest = await collect(stream)
        assert rest.token_ids == reference(prompt_of(13, 9), 60)[seen:]
        assert rest.usage is not None and rest.usage.generated_tokens == 60
        await harness.settled()


@pytest.mark.parametrize("seed", range(3))
async def test_answers_are_the_same_with_and_without_a_launch_ahead(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [prompt_of(rng.randrange(4), rng.randint(1, 40)) for _ in range(10)]
    lengths = [rng.randint(1, 30) for _ in prompts]
    answers = []
    for ahead in (True, False):
        async with running_engine(num_pages=30, async_scheduling=ahead) as harness:
            asked = [harness.ask(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
            answers.append([(await collect(stream)).token_ids for stream in asked])
            await harness.settled()
    assert answers[0] == answers[1]
