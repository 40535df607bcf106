"""Sampling: filters against the Hugging Face processors, frequencies against the softmax, draws that repeat."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.backend import Backend
from kernels.sample_tokens import SamplingTensors, sample_tokens
from kernels.sample_tokens.reference import drawn, filtered, penalised
from tests.worker_service.model_kit import CPU
from worker_service.core.batch import CountedRow, SampledRow
from worker_service.core.sampling_params import SamplingParams
from worker_service.model.penalty_counts import PenaltyCounts
from worker_service.model.results import joined, unjoined
from worker_service.model.sampling_arrays import LEAST_TEMPERATURE, most_logprobs, row_key, sampling_arrays
from worker_service.model.staging import Upload

VOCAB = 60


def row(position: int = 0, history: list[int] | None = None, **params: Any) -> SampledRow:
    """`history` is the prompt."""
    counted = None if history is None else CountedRow(0, array("i", history), len(history))
    return SampledRow(0, SamplingParams(**params), position, counted)


def slotted(entry: SampledRow, slot: int) -> SampledRow:
    return entry if entry.counted is None else entry._replace(counted=entry.counted._replace(slot=slot))


def staged(rows: list[SampledRow]) -> SamplingTensors:
    return SamplingTensors(*(tensor.clone() for tensor in Upload(CPU).send(sampling_arrays(rows))))


def draw(logits: torch.Tensor, rows: list[SampledRow]) -> torch.Tensor:
    """Every row with a history has a slot, and continues from the last token of it."""
    rows = [slotted(row, slot) for slot, row in enumerate(rows)]
    counts = PenaltyCounts(len(rows), logits.shape[1], CPU)
    counts.recount(rows)
    positions = [0 if row.counted is None else len(row.counted.tokens or ()) - 1 for row in rows]
    held = counts.of(torch.zeros(len(rows)).int(), torch.tensor(positions).int(), torch.arange(len(rows)).int())
    return sample_tokens(logits, staged(rows), held)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def survivors(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    sampling = staged([row(temperature=1.0, **params)] * logits.shape[0])
    return filtered(logits, sampling).isfinite()


def test_greedy_takes_the_lowest_index_of_equals() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [40, 7, 9]] = 2.0
    logits[1, VOCAB - 1] = 1.0
    assert draw(logits, [row()] * 3).tolist() == [7, VOCAB - 1, 0]


@pytest.mark.parametrize("top_k", [1, 2, 5, VOCAB, VOCAB + 7])
def test_top_k_keeps_what_the_reference_keeps(top_k: int) -> None:
    logits = random_logits(8)
    wanted = TopKLogitsWarper(top_k)(torch.empty(0), logits.clone()).isfinite()
    assert torch.equal(survivors(logits, top_k=top_k), wanted)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.8, 0.95, 0.999, 1.0])
def test_top_p_keeps_what_the_reference_keeps(top_p: float) -> None:
    logits = random_logits(8, seed=1)
    wanted = TopPLogitsWarper(top_p)(torch.empty(0), logits.clone()).isfinite()
    assert torch.equal(survivors(logits, top_p=top_p), wanted)


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_the_reference_keeps(min_p: float) -> None:
    logits = random_logits(8, seed=2)
    wanted = MinPLogitsWarper(min_p)(torch.empty(0), logits.clone()).isfinite()
    assert torch.equal(survivors(logits, min_p=min_p), wanted)


def test_filters_follow_each_other_as_in_the_reference() -> None:
    logits = random_logits(8, seed=3)
    wanted = logits.clone()
    for warper in (TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)):
        wanted = warper(torch.empty(0), wanted)
    assert torch.equal(survivors(logits, top_k=12, top_p=0.8, min_p=0.1), wanted.isfinite())


def test_top_p_is_the_smallest_set_that_reaches_the_mass() -> None:
    logits = random_logits(50, seed=4)
    kept = survivors(logits, top_p=0.7)
    probabilities = logits.softmax(-1)
    for row_kept, row_probabilities in zip(kept, probabilities, strict=True):
        inside = row_probabilities[row_kept]
        assert inside.sum() >= 0.7 - 1e-6
        assert inside.sum() - inside.min() < 0.7
        assert inside.min() >= row_probabilities[~row_kept].max()


def test_equal_scores_at_the_cut_fall_by_token_id() -> None:
    assert survivors(torch.zeros(1, VOCAB), top_k=3)[0].nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_penalty_is_the_references(penalty: float) -> None:
    logits, histories = random_logits(3, seed=5), [[1, 2, 2, 30], [0], [59, 5, 59]]
    rows = [slotted(row(history=h, repetition_penalty=penalty), slot) for slot, h in enumerate(histories)]
    counts = PenaltyCounts(3, VOCAB, CPU)
    counts.recount(rows)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    wanted = [processor(torch.tensor([h]), logits[i : i + 1].clone())[0] for i, h in enumerate(histories)]
    held = counts.of(*(torch.zeros(1).int(),) * 3).counts[:, :-1]
    assert torch.allclose(penalised(logits, staged(rows), held), torch.stack(wanted))


def test_added_penalties_concern_generated_tokens_only() -> None:
    """As OpenAI defines them: presence once, frequency for each time; the prompt's tokens are free."""
    logits = random_logits(1, seed=12)
    params = SamplingParams(presence_penalty=1.5, frequency_penalty=0.25)
    counted = CountedRow(0, array("i", [7, 7, 8, 9, 9, 9, 8]), 3)
    counts = PenaltyCounts(1, VOCAB, CPU)
    counts.recount([SampledRow(0, params, 7, counted)])
    held = counts.of(*(torch.zeros(1).int(),) * 3).counts
    wanted = logits.clone()
    wanted[0, 9] -= 1.5 + 3 * 0.25
    wanted[0, 8] -= 1.5 + 0.25
    sampling = staged([SampledRow(0, params, 7, counted)])
    assert torch.allclose(penalised(logits, sampling, held[:, :-1]), wanted)
    assert held[0, -1] == 7


def test_penalty_of_one_row_leaves_the_others_alone() -> None:
    logits = random_logits(2, seed=6)
    best = int(logits[0].argmax())
    rows = [row(history=[best], repetition_penalty=50.0), row(history=[int(logits[1].argmax())])]
    tokens = draw(logits, rows).tolist()
    assert tokens[0] != best
    assert tokens[1] == int(logits[1].argmax())


def test_frequencies_follow_the_filtered_softmax() -> None:
    """Chi-square over 20,000 positions of one seed: fixed numbers, so it passes or fails for good."""
    num_draws, logits = 20_000, random_logits(1, seed=7, vocab=12) / 3
    rows = [row(position=position, temperature=0.7, top_k=8, seed=99) for position in range(num_draws)]
    tokens = draw(logits.expand(num_draws, -1), rows).long()
    scaled = logits[0] / 0.7
    kept = scaled >= scaled.sort(descending=True).values[7]
    wanted = scaled.masked_fill(~kept, -torch.inf).softmax(-1) * num_draws
    counts = torch.bincount(tokens, minlength=12).double()
    assert counts[~kept].sum() == 0
    chi_square = ((counts - wanted)[kept] ** 2 / wanted[kept]).sum().item()
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


def test_noise_of_neighbouring_positions_seeds_and_tokens_is_unrelated() -> None:
    keys = {row_key(seed, position) for seed in range(60) for position in range(60)}
    assert len(keys) == 3600
    flat = torch.zeros(4000, 2)
    tokens = draw(flat, [row(position=n, temperature=1.0, seed=5) for n in range(4000)])
    assert 1850 < tokens.sum().item() < 2150
    assert 1850 < (tokens[1:] == tokens[:-1]).sum().item() < 2150


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """Alone, in a batch, in another order and beside other parameters: the same token."""
    logits = random_logits(6, seed=8)
    rows = [
        row(position=3, temperature=1.0, seed=1),
        row(),
        row(position=9, temperature=0.8, top_p=0.9, seed=2**64 - 1),
        row(position=4, temperature=1.5, top_k=20, seed=1),
        row(position=4, temperature=1.0, min_p=0.02, seed=12345678901234),
        row(position=8, temperature=1.0, history=[4, 5], repetition_penalty=1.2, seed=3),
    ]
    together = draw(logits, rows).tolist()
    assert [int(draw(logits[i : i + 1], [rows[i]])) for i in range(6)] == together
    assert draw(logits.flip(0), rows[::-1]).tolist() == together[::-1]


def test_seed_and_position_change_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {int(draw(logits, [row(position=p, temperature=1.0, seed=s)])) for p in range(5) for s in range(5)}
    assert len(tokens) > 20


def word_of(seed: int, position: int, token_id: int) -> int:
    """The hash in plain integers: a change of it would break retries between versions."""
    low, high = row_key(seed, position)
    word = token_id ^ low
    for addend in (high, 0):
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32
        word = (word ^ word >> 15) * 0x846CA68B % 2**32
        word = (word ^ word >> 16) + addend & 0xFFFFFFFF
    return word


def test_draws_are_the_hashes_smallest_word() -> None:
    """With equal scores the largest noise wins; noise grows as the word of the hash does."""
    rows = [row(position=position, temperature=1.0, seed=2**63 + 17) for position in range(20)]
    tokens = draw(torch.zeros(20, 500), rows).tolist()
    words = [[word_of(2**63 + 17, position, token) for token in range(500)] for position in range(20)]
    assert tokens == [position_words.index(min(position_words)) for position_words in words]


def test_the_row_key_is_pinned() -> None:
    assert [row_key(0, 0), row_key(42, 7), row_key(2**64 - 1, 100_000)] == [
        (1293516399, 2802244911),
        (3427297166, 3155600340),
        (3158532182, 533595491),
    ]


def test_tiny_temperatures_are_greedy_and_finite() -> None:
    logits = random_logits(2, seed=9)
    rows = [row(temperature=LEAST_TEMPERATURE / 2), row(temperature=LEAST_TEMPERATURE, seed=4)]
    assert draw(logits, rows).tolist() == logits.argmax(-1).tolist()


def test_a_single_survivor_is_always_taken() -> None:
    logits = random_logits(200, seed=10)
    rows = [row(position=position, temperature=1.0, top_k=1, seed=position) for position in range(200)]
    assert torch.equal(drawn(logits, staged(rows)), logits.argmax(-1))
    assert torch.equal(draw(logits, rows).long(), logits.argmax(-1))


def test_logprobs_are_the_models_own() -> None:
    """Before penalties, temperature and filters."""
    logits = random_logits(3, seed=11)
    rows = [row(logprobs=4), row(temperature=2.0, top_k=2, seed=1), row(logprobs=0)]
    tokens = draw(logits, rows)
    result = unjoined(joined(tokens, logits, most_logprobs(rows), Backend.REFERENCE), rows, 4)
    wanted = logits.log_softmax(-1)
    best = wanted.sort(descending=True, stable=True)
    assert result.token_ids == tuple(tokens.tolist())
    assert result.logprobs[1] is None
    for at, count in ((0, 4), (2, 0)):
        found = result.logprobs[at]
        assert found is not None
        assert found.sampled == pytest.approx(wanted[at, tokens[at]].item())
        assert [token for token, _ in found.top] == best.indices[at, :count].tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values[at, :count].tolist())


def test_more_logprobs_than_tokens() -> None:
    """The vocabulary is all that there is."""
    logits = random_logits(1, vocab=5)
    rows = [row(logprobs=64)]
    result = unjoined(joined(draw(logits, rows), logits, most_logprobs(rows), Backend.REFERENCE), rows, 64)
    assert result.logprobs[0] is not None
    assert len(result.logprobs[0].top) == 5


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    tokens, logits = torch.zeros(2).int(), random_logits(2)
    assert most_logprobs([row(), row(temperature=1.0)]) == -1
    assert joined(tokens, logits, -1, Backend.REFERENCE) is tokens
    assert most_logprobs([row(logprobs=0), row()]) == 0
    only_own = unjoined(joined(tokens, logits, 0, Backend.REFERENCE), [row(logprobs=0), row()], 0)
    assert only_own.logprobs[0] is not None
    assert only_own.logprobs[0].top == ()


def test_arrays_of_greedy_rows_are_those_of_others() -> None:
    """Made once for each number of rows, or for each launch: the same values."""
    greedy = sampling_arrays([row(), row()])
    mixed = sampling_arrays([row(temperature=1.0, seed=3), row()])
    assert [values.typecode for values in greedy] == [values.typecode for values in mixed]
    assert [list(values) for values in greedy] == [[values[1]] * 2 for values in mixed]
