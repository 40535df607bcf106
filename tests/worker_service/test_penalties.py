"""Penalties, counted where the launches run: the tokens of an oracle that has the whole history, whatever happens.

The engine, the scheduler and the manager are real; a launch scores tokens at random, by the history that it reads.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from kernels.sample_tokens import SamplingTensors, sample_tokens
from session.words import Namespace, SequenceId
from tests.worker_service.engine_harness import VOCAB, ToyRunner, collect, mark_of, running_engine
from tests.worker_service.model_kit import CPU
from tests.worker_service.scheduler_machine import Machine, full_group, packed
from worker_service.core.batch import Batch
from worker_service.core.penalty_slots import PenaltySlots
from worker_service.core.runner_port import LaunchTokens
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import NO_PENALTY_SLOT, QueueOrder, Request, State
from worker_service.core.sequence import Sequence as CoreSequence
from worker_service.model.penalty_counts import PenaltyCounts
from worker_service.model.sampling_arrays import sampling_arrays
from worker_service.model.staging import Upload

NUM_SLOTS = 8


def scores_of(history: Sequence[int]) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(mark_of(history))) * 2


def oracle(prompt: Sequence[int], count: int, params: SamplingParams) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        scores, answered = scores_of(tokens), Counter(tokens[len(prompt) :])
        for token in set(tokens):
            penalty = params.repetition_penalty
            scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
            scores[token] -= answered[token] * params.frequency_penalty
            scores[token] -= (answered[token] > 0) * params.presence_penalty
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


class CountingRunner(ToyRunner):
    """A launch that fails has counted already."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = PenaltyCounts(NUM_SLOTS, VOCAB, CPU)
        self.num_recounts = 0

    def run(self, batch: Batch) -> LaunchTokens:
        self.num_launches += 1
        for token, slot in zip(batch.token_ids, batch.slot_mapping[0], strict=True):
            self.memory[slot] = token
        tokens = self.sampled(batch) if batch.sampled else ()
        if self.fail_when(batch):
            raise RuntimeError("out of luck")
        return LaunchTokens(tokens, (None,) * len(tokens))

    def sampled(self, batch: Batch) -> tuple[int, ...]:
        self.num_recounts += sum(row.counted is not None and row.counted.tokens is not None for row in batch.sampled)
        self.counts.recount(batch.sampled)
        logits = torch.stack([scores_of(self._keys(batch, row.row)) for row in batch.sampled])
        params = SamplingTensors(*Upload(CPU).send(sampling_arrays(batch.sampled)))
        launched = Upload(CPU).send([batch.token_ids, batch.positions, batch.logits_rows])
        return tuple(sample_tokens(logits, params, self.counts.of(*launched)).tolist())


def some_params(rng: random.Random) -> dict[str, float]:
    return {
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
        "presence_penalty": rng.choice([0.0, 1.5, -0.5]),
        "frequency_penalty": rng.choice([0.0, 0.75, -0.1]),
    }


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("num_pages", [200, 26])
async def test_answers_are_the_oracles(num_pages: int, ahead: bool) -> None:
    """With and without a launch ahead; in a small pool sequences are preempted, resumed and counted anew."""
    rng = random.Random(1)
    asked = [([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], some_params(rng)) for _ in range(14)]
    runner = CountingRunner()
    async with running_engine(
        num_pages=num_pages, runner=runner, max_num_seqs=NUM_SLOTS, async_scheduling=ahead
    ) as harness:
        streams = [harness.ask(prompt, 24, **params) for prompt, params in asked]
        answers = [await collect(stream) for stream in streams]
        await harness.settled()
    num_penalised = sum(SamplingParams(**params).has_penalties for _, params in asked)  # type: ignore[arg-type]
    num_preemptions = 0
    for (prompt, params), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == oracle(prompt, 24, SamplingParams(**params))  # type: ignore[arg-type]
        assert answer.usage is not None
        num_preemptions += answer.usage.num_preemptions
    assert (num_preemptions > 0) == (num_pages < 200)
    # Once for each lease, not for each token.
    assert num_penalised <= runner.num_recounts <= num_penalised + num_preemptions


async def test_a_launch_that_is_run_in_parts_counts_once() -> None:
    runner = CountingRunner()
    prompts = [[seed, seed + 1, seed + 2] for seed in range(6)]
    async with running_engine(runner=runner, max_num_seqs=NUM_SLOTS) as harness:
        failed: list[Batch] = []

        def fails(batch: Batch) -> bool:
            if batch.num_seqs == 1 or runner.num_launches % 5:
                return False
            failed.append(batch)
            return True

        runner.fail_when = fails
        params = {"frequency_penalty": 1.0, "repetition_penalty": 1.4}
        answers = [await collect(stream) for stream in [harness.ask(prompt, 20, **params) for prompt in prompts]]
        await harness.settled()
    assert failed, "none was run in parts"
    assert [answer.token_ids for answer in answers] == [oracle(p, 20, SamplingParams(**params)) for p in prompts]  # type: ignore[arg-type]


def test_a_launch_is_planned_ahead_whatever_the_penalty() -> None:
    """The token that it continues from is on the device only; it is counted there."""
    config = SchedulerConfig(4, (full_group(8),), max_model_len=32, vocab_size=VOCAB, token_budget=64, max_num_seqs=8)
    driven = Machine(config, host=False)
    driven.ask([1, 2, 3], 6, repetition_penalty=1.2)
    driven.exchange()
    assert driven.start() and driven.start_ahead()
    first, second = driven.launches
    assert first.batch.sampled[0].counted == (0, array("i", [1, 2, 3]), 3)
    assert second.batch.from_previous.tolist() == [0]
    assert second.batch.sampled[0].counted == (0, None, 3)


def sequence(number: int, **params: float) -> CoreSequence:
    request = Request(SequenceId(number), Namespace("m"), packed([1, 2]), SamplingParams(**params))  # type: ignore[arg-type]
    return CoreSequence(request, QueueOrder(0, number), 1)


def test_a_slot_is_kept_until_its_sequence_ends_or_loses_its_lease() -> None:
    slots = PenaltySlots(2)
    plain, *penalised = sequence(0), *(sequence(number, presence_penalty=1.0) for number in range(1, 5))
    first, second, third, fourth = penalised
    for entry in (plain, first, second, first):
        slots.assign(entry)
    assert [plain.penalty_slot, first.penalty_slot, second.penalty_slot] == [NO_PENALTY_SLOT, 0, 1]
    first.state = State.FINISHED
    slots.assign(third)
    assert third.penalty_slot == 0
    second.forget_lease()
    assert (second.penalty_slot, second.counted_len) == (NO_PENALTY_SLOT, -1)
    slots.assign(fourth)
    assert fourth.penalty_slot == 1
    third.state = State.FINISHED
    slots.assign(second)
    assert second.penalty_slot == 0
