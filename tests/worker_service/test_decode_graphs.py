"""Captured decode launches: the ladder anywhere; on a GPU, replays give the bits and tokens of uncaptured launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.device_waits import no_device_waits
from tests.worker_service.model_kit import PAGE, Bench, FakeSequence, Part, make_reference, random_tokens
from worker_service.core.batch import Batch
from worker_service.model.decode_graphs import ladder
from worker_service.model.demo_model import make_demo_model
from worker_service.model.device import prepare_process
from worker_service.model.products import Invariance
from worker_service.model.runner import RunnerLimits

CUDA = torch.device("cuda", 0)
if torch.cuda.is_available():
    prepare_process(CUDA, 0)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The demo model is wide enough for the GEMM of decode rows; the others are not.
MODELS = ("llama-wide-heads-yarn", "qwen3-tied-windows", "demo")
MAX_NUM_SEQS = 12


@pytest.mark.parametrize("most", [1, 3, 8, 24, 61, 64, 65, 200, 256])
def test_the_ladder_reaches_its_end_in_bounded_steps(most: int) -> None:
    rungs = ladder(most)
    assert rungs[-1] == most
    assert list(rungs) == sorted(set(rungs))
    assert len(rungs) <= 11 + most // 32
    for rows in range(1, most + 1):
        rung = min(rung for rung in rungs if rung >= rows)
        assert rung - rows < max(8, rows)


class Twins:
    """One model with and without graphs; each has pages of its own, so that neither heals what the other spoils."""

    def __init__(self, folder: Path, invariance: Invariance) -> None:
        self.captured, self.plain = (
            Bench(folder, CUDA, torch.bfloat16, RunnerLimits(MAX_NUM_SEQS, 256, invariance, decode_graphs=graphs))
            for graphs in (True, False)
        )

    def decode(self, lengths: list[int], **sampling: object) -> tuple[Batch, Batch]:
        """A launch of one new token behind prompts of such lengths, which were computed before: for each twin."""
        sequences = [random_tokens(length + 1, length) for length in lengths]
        batches = []
        for bench in (self.captured, self.plain):
            rows: list[FakeSequence] = []
            for place, tokens in enumerate(sequences):
                rows.append(bench.sequence(tokens, range(3 * place + 1, 3 * place + 4), **sampling))
                bench.all_logits(Part(rows[-1], 0, len(tokens) - 1))
            batches.append(bench.batch(*(Part(row, len(row.tokens) - 1, len(row.tokens)) for row in rows)))
        return batches[0], batches[1]


@pytest.fixture(scope="module", params=[(name, kind) for name in MODELS for kind in Invariance], ids=str)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    name, invariance = request.param
    folder = tmp_path_factory.mktemp(name)
    if name == "demo":
        make_demo_model(folder, seed=3)
    else:
        make_reference(name, folder)
    return Twins(folder, invariance)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[5], [1, 40], [PAGE, PAGE - 1, 2 * PAGE], [7] * 5, list(range(20, 32))], ids=str)
def test_a_replay_has_the_bits_of_the_launch(twins: Twins, lengths: list[int]) -> None:
    one, other = twins.decode(lengths)
    graphs = twins.captured.runner._graphs
    assert graphs is not None and graphs.fits(one)
    assert torch.equal(twins.captured.runner.logits(one), twins.plain.runner.logits(other))
    assert twins.captured.runner.run(one) == twins.plain.runner.run(other)
    for layer in range(twins.captured.config.num_layers):
        for mine, its in zip(*(b.pages.layer_pages(layer)[:2] for b in (twins.captured, twins.plain)), strict=True):
            assert mine[0].count_nonzero() == 0, "a padding row reached the reserved page"
            assert torch.equal(mine.nan_to_num(), its.nan_to_num())


@pytest.mark.gpu
@needs_gpu
def test_replays_follow_each_other_without_a_trace(twins: Twins) -> None:
    """A larger launch leaves its rows in the static buffers; a smaller one after it must not see them."""
    for lengths in ([30] * 12, [3], [17, 18], [30] * 12, [3]):
        one, other = twins.decode(lengths)
        assert twins.captured.runner.run(one) == twins.plain.runner.run(other)


@pytest.mark.gpu
@needs_gpu
def test_wishes_are_heard_behind_a_replay(twins: Twins) -> None:
    one, other = twins.decode([9, 20, 31], temperature=0.9, top_k=30, seed=4, repetition_penalty=1.3, logprobs=3)
    wanted = twins.plain.runner.run(other)
    assert twins.captured.runner.run(one) == wanted
    assert all(entry is not None and len(entry.top) == 3 for entry in wanted.logprobs)


@pytest.mark.gpu
@needs_gpu
def test_a_replay_waits_for_nothing_but_its_tokens(twins: Twins) -> None:
    one, _ = twins.decode([9, 20, 31])
    wanted = twins.captured.runner.run(one)
    with no_device_waits():
        assert twins.captured.runner.run(one) == wanted


@pytest.mark.gpu
@needs_gpu
def test_launches_beyond_the_ladder_and_mixed_ones_run_uncaptured(twins: Twins) -> None:
    bench = twins.captured
    graphs = bench.runner._graphs
    assert graphs is not None
    one, other = twins.decode([4] * (MAX_NUM_SEQS + 1))
    assert not graphs.fits(one)
    assert bench.runner.run(one) == twins.plain.runner.run(other)
    decoding, chunk = bench.sequence(random_tokens(8, 1), [1]), bench.sequence(random_tokens(20, 2), [2, 3])
    bench.all_logits(Part(decoding, 0, 7))
    assert not graphs.fits(bench.batch(Part(decoding, 7, 8), Part(chunk, 0, 20)))
