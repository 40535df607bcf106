"""A whole model whose prompts attend by segments of keys: a prompt's bits are the same cold, cut and behind a hit."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
import torch

from benchmarks.paged_model import PagedModel
from tests.worker_service.cuda_device import NEEDS_CUDA
from worker_service.core.batch import build_batch
from worker_service.core.launch_plan import Row
from worker_service.core.sequence import Sequence as CoreSequence
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.runner import RunnerLimits

pytestmark = NEEDS_CUDA

CUDA = torch.device("cuda", 0)
SEGMENT, BUDGET = 4096, 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}


def model(segment_tokens: int) -> PagedModel:
    prepare_process(CUDA, 0)
    limits = RunnerLimits(8, BUDGET, Invariance.BATCH, graphs=True, attention_segment_tokens=segment_tokens)
    return PagedModel(CONFIG, 1200, limits, CUDA)


def answered(paged: PagedModel, length: int, cut: int, mate: int = 0) -> torch.Tensor:
    """Returns the logits of a prompt's last token; the launch from `cut` on holds a prompt of `mate` tokens, too."""
    paged.free_pages()
    paged.generator.manual_seed(length)
    sequence = paged.sequence(length)
    for first, end in pairwise([*range(0, cut, BUDGET), cut]):
        paged.runner.run(paged.batch([sequence], first, end))
    rows = [Row(cast(CoreSequence, sequence), cut, length - cut)]
    if mate:
        rows.append(Row(cast(CoreSequence, paged.sequence(mate)), 0, mate))
    return paged.runner.logits(build_batch(rows, 0, paged.pages.specs(), paged.page_tokens))[0]


@pytest.mark.gpu
def test_cold_equals_hit_behind_a_prefix_of_several_segments() -> None:
    segments, whole = model(SEGMENT), model(0)
    for length in (SEGMENT + 30, 2 * SEGMENT + 500, 2 * SEGMENT + 16):
        cold = answered(segments, length, (length - 1) // BUDGET * BUDGET)
        for cut in {length - 2, length - 16, length - 300, SEGMENT - 1, SEGMENT} & set(range(length - BUDGET, length)):
            assert torch.equal(answered(segments, length, cut), cold), (length, cut)
            assert torch.equal(answered(segments, length, cut, mate=300), cold), (length, cut)
        other = answered(whole, length, length - 16)
        assert (other - cold).abs().max() < 0.15 * cold.std(), length
    assert torch.equal(answered(segments, SEGMENT, SEGMENT - 64), answered(whole, SEGMENT, SEGMENT - 64))
