"""What docs/invariance.md promises, on a GPU: a token's logits have the same bits however its prompt was computed.

Each case draws a prompt, where its prefix comes from, where it is cut, which pages hold it and who shares its launches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.fp8 import E4M3
from tests.worker_service.cuda_device import NEEDS_CUDA, prepared_cuda
from tests.worker_service.invariance_rig import (
    VOCAB,
    Case,
    Scale,
    World,
    check_decoding,
    check_prefill,
    drawn_tokens,
)
from tests.worker_service.model_kit import Part
from worker_service.model.gemm_dispatch import Invariance

CUDA = prepared_cuda()
pytestmark = NEEDS_CUDA

CASES = 8
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def make_world(page_tokens: int, invariance: Invariance, kv_dtype: torch.dtype | None = None) -> World:
    return World(MODEL, page_tokens, invariance, CUDA, torch.bfloat16, Scale(), kv_dtype)


@pytest.fixture(scope="module", params=[16, 128], ids="page{}".format)
def strict_world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield make_world(request.param, Invariance.STRICT)
    torch.cuda.empty_cache()


WORLDS = {
    **{f"page{page_tokens}": (page_tokens, torch.bfloat16) for page_tokens in (16, 32, 128, 1)},
    "page16-fp8": (16, E4M3),
}


@pytest.fixture(scope="module", params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    page_tokens, kv_dtype = WORLDS[request.param]
    yield make_world(page_tokens, Invariance.BATCH, kv_dtype)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("seed", range(CASES))
def test_prefill_gives_the_cold_logits(world: World, seed: int) -> None:
    check_prefill(world, seed)


@pytest.mark.parametrize("seed", range(CASES))
def test_decoding_gives_the_same_logits_in_any_company(world: World, seed: int) -> None:
    check_decoding(world, seed)


def test_pages_written_by_decoding_are_near_those_of_a_prompt(world: World) -> None:
    """Not promised to be equal: decode rows have GEMMs and attention of their own. So a bound is what is tested."""
    source = random.Random(7)
    world.clear(source)
    tokens = drawn_tokens(source, 200)
    whole, stepwise = world.new_sequence(tokens), world.new_sequence(tokens)
    wanted = world.all_logits(Part(whole, 0, 200))[-1]
    world.all_logits(Part(stepwise, 0, 100))
    for first in range(100, 180):
        world.all_logits(Part(stepwise, first, first + 1))
    got = world.all_logits(Part(stepwise, 180, 200))[-1]
    assert (got - wanted).abs().max() < 0.15 * wanted.std()


@pytest.mark.parametrize("seed", range(CASES))
def test_strict_decoding_has_the_bits_of_a_prompt(strict_world: World, seed: int) -> None:
    """Tokens behind the prompt one by one, then the rest as one chunk behind pages that decoding wrote."""
    world = strict_world
    case = Case(world, 200 + seed)
    length = len(case.prompt)
    start, num_decoded = length // 3, min(40, length // 3)
    sequence = world.new_sequence(case.prompt)
    if start:
        case.in_company(Part(sequence, 0, start))
    for first in range(start, start + num_decoded):
        row = world.sequence(case.prompt[: first + 1], sequence.tables[0])
        decoding, chunks = case.neighbours() if first % 8 == 0 else ([], [])
        parts = [*decoding, Part(row, first, first + 1), *chunks]
        got = world.runner.logits(world.batch(*parts))[len(decoding)]
        assert torch.equal(got, case.wanted[first]), f"decoded token {first}"
    rest = case.in_company(Part(sequence, start + num_decoded, length))
    assert torch.equal(rest, case.wanted[start + num_decoded :])
