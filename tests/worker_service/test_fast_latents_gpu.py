"""A whole model over latents in `fast`, which cuts decode by load, beside `batch`, which cuts at fixed places."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
import torch

from benchmarks.paged_model import PagedModel
from tests.worker_service.cuda_device import NEEDS_CUDA
from tests.worker_service.published_configs import PUBLISHED
from worker_service.core.batch import build_batch
from worker_service.core.launch_plan import Row
from worker_service.core.sequence import Sequence as CoreSequence
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.runner import RunnerLimits

pytestmark = NEEDS_CUDA

CUDA = torch.device("cuda", 0)
# The attention of DeepSeek V3 as it is, in three narrow layers without experts.
CONFIG = {
    **PUBLISHED["deepseek-ai/DeepSeek-V3"],
    "hidden_size": 512,
    "intermediate_size": 512,
    "max_position_embeddings": 16_384,
    "num_hidden_layers": 3,
    "q_lora_rank": 256,
    "vocab_size": 2048,
}
# Behind a cut no prompt has one token left, which would be a decode row.
LENGTHS = ([9000], [1, 63, 64, 66], [4096, 17, 5000, 1, 2, 300, 1024])


def model(invariance: Invariance) -> PagedModel:
    prepare_process(CUDA, 0)
    return PagedModel(CONFIG, 1200, RunnerLimits(8, 2048, invariance, graphs=True), CUDA)


def decoded(paged: PagedModel, lengths: list[int], cut: int = 0) -> torch.Tensor:
    """Returns the logits of one launch with a new token behind each prompt, which was computed in two at `cut`."""
    paged.free_pages()
    paged.generator.manual_seed(sum(lengths))
    sequences = [paged.sequence(length + 1) for length in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        ends = sorted({0, min(cut, length), *range(2048, length, 2048), length})
        for first, end in pairwise(ends):
            paged.runner.run(paged.batch([sequence], first, end))
    rows = [Row(cast(CoreSequence, entry), length, 1) for entry, length in zip(sequences, lengths, strict=True)]
    batch = build_batch(rows, len(rows), paged.pages.specs(), paged.page_tokens)
    return paged.runner.logits(batch)


@pytest.mark.gpu
def test_decode_by_load_is_near_the_tree_of_batch_cold_and_behind_a_hit() -> None:
    fast, batch = model(Invariance.FAST), model(Invariance.BATCH)
    for lengths in LENGTHS:
        wanted = decoded(batch, lengths)
        for cut in (0, 64, 1000):
            got = decoded(fast, lengths, cut)
            assert (got - wanted).abs().max() < 0.15 * wanted.std(), (lengths, cut)
            assert torch.equal(decoded(batch, lengths, cut), wanted), (lengths, cut)
