"""The model on a CUDA device: near the fp32 reference, the same bits however a prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker_service.cuda_device import NEEDS_CUDA, prepared_cuda
from tests.worker_service.loaded_tensors import LoadedTensors
from tests.worker_service.model_kit import CPU, PAGE, Bench, Part, make_reference, random_tokens
from worker_service.gpu.page_pools import PagePools
from worker_service.model.config import parse_model_spec
from worker_service.model.decoder import Decoder, expected_shapes
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import Runner

CUDA = prepared_cuda()
pytestmark = NEEDS_CUDA

LAYERS = 4
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


class LargeBench(Bench):
    """Random weights in the shape of an 8B model with fewer layers, made on the device."""

    def __init__(self) -> None:
        self.config, self.page = parse_model_spec(LLAMA_8B), PAGE
        generator = torch.Generator(CUDA).manual_seed(0)
        tensors = {}
        for name, shape in expected_shapes(self.config).items():
            values = torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)
            tensors[name] = values / shape[-1] ** 0.5 if len(shape) == 2 else torch.ones_like(values)
        tensors["model.embed_tokens.weight"] *= 64
        layouts = page_layouts(self.config, torch.bfloat16, PAGE)
        self.pages = PagePools(layouts, [600], PAGE, CUDA)
        self.runner = Runner(Decoder(self.config, LoadedTensors(tensors), CUDA), self.pages, CUDA)


@pytest.fixture(scope="module")
def large() -> LargeBench:
    return LargeBench()


@pytest.mark.parametrize("name", ["llama-wide-heads-yarn", "qwen3-tied-windows", "mistral-window-20"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_near_the_fp32_reference(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_reference(name, tmp_path)
    tokens = random_tokens(100, 1)
    exact, bench = Bench(tmp_path), Bench(tmp_path, CUDA, dtype)
    wanted = exact.all_logits(Part(exact.sequence(tokens, range(1, 8)), 0, 100))
    limit = 0.15 if dtype is torch.bfloat16 else 0.02
    for chunk in (100, 33, 1):
        actual = bench.chunked_logits(bench.sequence(tokens, range(9, 16)), chunk).to(CPU)
        assert (actual - wanted).abs().max() < limit * wanted.std()


def test_a_cut_prompt_has_the_bits_of_the_whole_one(large: LargeBench) -> None:
    tokens = random_tokens(1500, 2)
    whole = large.all_logits(Part(large.sequence(tokens, range(1, 100)), 0, 1500))
    for chunk in (512, 333, 16):
        chunked = large.chunked_logits(large.sequence(tokens, range(101, 200)), chunk)
        assert torch.equal(chunked, whole), f"chunk {chunk}: {(chunked - whole).abs().max()}"


def generate(large: LargeBench, tokens: list[int], table: list[int], first: int, count: int) -> list[int]:
    sequence = large.sequence(tokens, table)
    for _ in range(count):
        end = len(sequence.tokens)
        sequence.tokens.extend(large.run(Part(sequence, first, end)).token_ids)
        first = end
    return list(sequence.tokens[-count:])


def test_cached_and_cold_runs_give_the_same_greedy_tokens(large: LargeBench) -> None:
    tokens = random_tokens(700, 3)
    cold = generate(large, tokens, list(range(1, 60)), 0, 64)
    cached = generate(large, tokens, [*range(1, 41), *range(300, 320)], 640, 64)
    assert cached == cold
    assert len(set(cold)) > 3


def test_fetched_pages_give_the_same_greedy_tokens(large: LargeBench) -> None:
    tokens = random_tokens(700, 4)
    cold = generate(large, tokens, list(range(1, 60)), 0, 32)
    packed = large.pages.read_pages(0, range(1, 41))
    assert packed.is_pinned()
    large.pages.write_pages(0, range(400, 440), packed)
    assert generate(large, tokens, [*range(400, 440), *range(300, 320)], 640, 32) == cold


def test_a_row_has_the_same_bits_in_any_company(large: LargeBench) -> None:
    prompts = [random_tokens(length, length) for length in (300, 45, 129, 16)]
    sequences = [large.sequence(prompt, range(20 * n + 1, 20 * n + 21)) for n, prompt in enumerate(prompts)]
    parts = [Part(sequence, 0, len(sequence.tokens)) for sequence in sequences]
    together = large.runner.logits(large.batch(*parts))
    alone = torch.cat([large.runner.logits(large.batch(part)) for part in parts])
    assert torch.equal(together, alone)
