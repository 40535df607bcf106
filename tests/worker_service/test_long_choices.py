"""Launches behind prefixes of tens of thousands of tokens where keys are chosen: laid out as a captured one is, on a
GPU captured, they have the bits of plain launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker_service.model_kit import (
    MODELS,
    NUM_PAGES,
    SIZES,
    Bench,
    Part,
    config_of,
    random_reference,
    random_tokens,
)
from worker_service.core.batch import Batch
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.launch_buckets import GraphLimits, chosen_keys
from worker_service.model.launch_graphs import LaunchGraphs
from worker_service.model.runner import RunnerLimits

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
if torch.cuda.is_available():
    prepare_process(CUDA, 0)
LONGEST = 70_000
# By name: tokens of the cached prefix, and new tokens.
HITS = {"16": (65_536, 16), "within a page": (20_011, 29), "many": (40_000, 500)}
MAX_NUM_SEQS, MAX_TOKENS = 6, 512
# Pages that a prefix repeats.
NUM_OF_PREFIX = 4


@pytest.fixture(scope="module", params=["deepseek-v32", "deepseek-v4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, fields = MODELS[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param)
    config: Any = config_of(family, {**SIZES, **fields, "max_position_embeddings": LONGEST})
    random_reference(config, seed=5, spread=0.15).save_pretrained(folder)
    return folder


def filled(bench: Bench) -> Bench:
    """Gives pages something to read: of a prefix there are more tokens than pages, which repeat."""
    generator = torch.Generator().manual_seed(1)
    for layer in range(len(bench.config.layers)):
        for pages in bench.pages.planes(layer):
            pages[1:].copy_(torch.randn(pages[1:].shape, generator=generator))
    return bench


def launch(bench: Bench, cached: int, new: int) -> Batch:
    """A chunk behind a long prefix, beside a decode row and a fresh prompt; what is new has pages of its own."""
    first_new, num_pages = cached // bench.page, -(-(cached + new) // bench.page)
    own = iter(range(1 + NUM_OF_PREFIX, NUM_PAGES))
    pages = [1 + page % NUM_OF_PREFIX if page < first_new else next(own) for page in range(num_pages)]
    hit = bench.sequence(random_tokens(cached + new, 1), pages)
    decoding, fresh = (bench.sequence(random_tokens(length, length), [next(own)]) for length in (9, 7))
    return bench.batch(Part(decoding, 8, 9), Part(hit, cached, cached + new), Part(fresh, 0, 5))


@pytest.mark.parametrize("hit", ["16", "within a page"])
def test_a_fixed_layout_has_the_bits_of_the_launch(folder: Path, hit: str) -> None:
    fixed, plain = filled(Bench(folder)), filled(Bench(folder))
    limits = GraphLimits(
        MAX_NUM_SEQS, 64, LONGEST, fixed.page, fixed.pages.num_groups, fixed.runner._gemm.least_rows,
        one_phase=False, max_prompt_keys=LONGEST, chooses_keys=True,
    )  # fmt: skip
    graphs = LaunchGraphs(fixed.runner._computed, fixed.runner._last, limits, CPU)
    batch, same = (launch(bench, *HITS[hit]) for bench in (fixed, plain))
    bucket = graphs.bucket_for(batch)
    assert bucket is not None and bucket.prompt_keys in chosen_keys(LONGEST)
    with torch.inference_mode():
        graphs._fill(bucket, batch)
        got = graphs._run(bucket).logits[: len(batch.sampled)]
    assert torch.equal(got, plain.runner.logits(same))
    assert_same_pages(fixed, plain)


def assert_same_pages(one: Bench, other: Bench) -> None:
    for layer in range(len(one.config.layers)):
        for mine, its in zip(*(bench.pages.planes(layer) for bench in (one, other)), strict=True):
            assert torch.equal(mine, its)


@pytest.fixture(scope="module")
def twins(folder: Path) -> tuple[Bench, Bench]:
    """One model with and without graphs."""
    made = [
        Bench(folder, CUDA, torch.bfloat16, RunnerLimits(MAX_NUM_SEQS, MAX_TOKENS, Invariance.BATCH, graphs=graphs))
        for graphs in (True, False)
    ]
    return made[0], made[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hit", HITS)
def test_a_replay_has_the_bits_of_the_launch(twins: tuple[Bench, Bench], hit: str) -> None:
    captured, plain = map(filled, twins)
    batch, same = (launch(bench, *HITS[hit]) for bench in (captured, plain))
    graphs = captured.runner._graphs
    assert graphs is not None
    bucket = graphs.bucket_for(batch)
    assert bucket is not None and bucket.prompt_keys == LONGEST
    assert torch.equal(captured.runner.logits(batch), plain.runner.logits(same))
    assert captured.runner.run(batch) == plain.runner.run(same)
    assert_same_pages(captured, plain)
