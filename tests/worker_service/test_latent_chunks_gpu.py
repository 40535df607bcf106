"""Prompts over latents whose keys are made in several chunks: a captured launch has the bits of one that is not."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from benchmarks.paged_model import PagedModel
from tests.worker_service.cuda_device import NEEDS_CUDA
from tests.worker_service.test_fast_latents_gpu import CONFIG, CUDA
from worker_service.core.batch import Batch, build_batch
from worker_service.core.launch_plan import Row
from worker_service.core.sequence import Sequence as CoreSequence
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.runner import RunnerLimits

pytestmark = NEEDS_CUDA

# Captured launches have four of them at most.
CHUNK = 1024
# Cached and new tokens: cut three times; begins in another chunk; shorter than one; beside a row that decodes.
PROMPTS = ([(3500, 200)], [(700, 90), (600, 130), (0, 64), (1900, 16)], [(200, 100)], [(2500, 1), (2900, 64), (5, 9)])


def model(*, graphs: bool) -> PagedModel:
    prepare_process(CUDA, 0)
    limits = RunnerLimits(4, 512, Invariance.BATCH, graphs=graphs, latent_chunk_tokens=CHUNK)
    return PagedModel(CONFIG, 600, limits, CUDA)


def launch(paged: PagedModel, prompts: list[tuple[int, int]]) -> Batch:
    """Returns one launch; what is cached are latents of random numbers, the same for each model of a config."""
    paged.free_pages()
    paged.generator.manual_seed(sum(cached for cached, _ in prompts))
    sequences = [paged.sequence(cached + new) for cached, new in prompts]
    rows = [Row(cast(CoreSequence, entry), *part) for entry, part in zip(sequences, prompts, strict=True)]
    num_decode = sum(new == 1 for _, new in prompts)
    return build_batch(rows, num_decode, paged.pages.specs(), paged.page_tokens)


@pytest.mark.gpu
def test_captured_chunks_have_the_bits_of_the_launch() -> None:
    captured, plain = model(graphs=True), model(graphs=False)
    for prompts in PROMPTS:
        batch = launch(captured, prompts)
        graphs = captured.runner._graphs
        assert graphs is not None and graphs.bucket_for(batch) is not None
        wanted = plain.runner.logits(launch(plain, prompts))
        assert torch.equal(captured.runner.logits(batch), wanted), prompts
