"""Launches of chosen keys laid out as a captured one is: arrays of fixed sizes, with padding between and behind.

Here they run uncaptured, on a CPU; tests/worker_service/test_launch_graphs.py replays them on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worker_service.model_kit import CPU, Bench, Part, make_reference, random_tokens
from worker_service.core.batch import Batch
from worker_service.model.launch_buckets import GraphLimits
from worker_service.model.launch_graphs import LaunchGraphs

MAX_NUM_SEQS, MAX_TOKENS, PROMPT_KEYS = 6, 128, 1024


@pytest.fixture(scope="module", params=["deepseek-v4", "deepseek-v32"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_reference(request.param, folder)
    return folder


def graphs_of(bench: Bench, one_phase: bool) -> LaunchGraphs:
    limits = GraphLimits(
        MAX_NUM_SEQS, MAX_TOKENS, bench.config.max_model_len, bench.page, bench.pages.num_groups,
        bench.runner._gemm.least_rows, one_phase, max_prompt_keys=PROMPT_KEYS, chooses_keys=True,
    )  # fmt: skip
    return LaunchGraphs(bench.runner._computed, bench.runner._last, limits, CPU)


def launch(bench: Bench, number: int) -> Batch:
    """Rows that decode, one of which ends a block of an entry, beside a fresh prompt and one behind a prefix; or fewer
    of them."""
    free = iter(range(10 * number + 1, 40))

    def sequence(length: int, computed: int) -> Part:
        tokens = random_tokens(length, length + number)
        made = bench.sequence(tokens, [next(free) for _ in range(-(-length // bench.page))])
        if computed:
            bench.all_logits(Part(made, 0, computed), num_decode=0)
        return Part(made, computed, length)

    decoding = [sequence(length, length - 1) for length in (9, bench.page, bench.page + 1)]
    chunks = [sequence(38, 0), sequence(bench.page + 30, bench.page)]
    return bench.batch(*(([*decoding, *chunks], [decoding[0], chunks[1]], decoding)[number]))


@pytest.mark.parametrize("one_phase", [False, True])
def test_a_fixed_layout_has_the_bits_of_the_launch(folder: Path, one_phase: bool) -> None:
    fixed, plain = Bench(folder), Bench(folder)
    graphs = graphs_of(fixed, one_phase)
    for number in range(3):  # a smaller launch after a larger one must not see its rows
        batch, same = (launch(bench, number) for bench in (fixed, plain))
        bucket = graphs.bucket_for(batch)
        assert bucket is not None and bucket.num_rows > batch.num_tokens
        with torch.inference_mode():
            graphs._fill(bucket, batch)
            got = graphs._run(bucket).logits[: len(batch.sampled)]
        assert torch.equal(got, plain.runner.logits(same)), number
    for layer in range(len(fixed.config.layers)):
        for mine, its in zip(*(bench.pages.planes(layer) for bench in (fixed, plain)), strict=True):
            assert mine[0].count_nonzero() == 0, "a padding row reached the reserved page"
            assert torch.equal(mine.nan_to_num(), its.nan_to_num())
