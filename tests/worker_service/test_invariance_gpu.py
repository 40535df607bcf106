"""What docs/invariance.md promises, on a GPU: a token's logits have the same bits however its prompt was computed.

Each case draws a prompt, where its prefix comes from, where it is cut, which pages hold it and who shares its launches;
the reference is the whole prompt computed alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels.fp8 import E4M3
from tests.worker_service.model_kit import Bench, PagedTokens, Part
from worker_service.core.batch import Batch, build_batch
from worker_service.core.launch_plan import Row
from worker_service.gpu.page_pools import PagePools
from worker_service.model.config import parse_model_spec
from worker_service.model.decoder import Decoder, expected_shapes
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import Runner, RunnerLimits
from worker_service.model.tensors import LoadedTensors

CUDA = torch.device("cuda", 0)
if torch.cuda.is_available():
    # While tests are collected: cuBLAS reads its settings once, at its first use in the process.
    prepare_process(CUDA, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POOL_TOKENS = 16_384
MAX_TOKENS = 1_400
MAX_MATES = 6
CASES = 8
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 4096,
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


class World(Bench):
    """A model of one page size, and a pool whose pages are dealt in random order and poisoned between owners."""

    def __init__(
        self,
        page_tokens: int,
        invariance: Invariance = Invariance.BATCH,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config = parse_model_spec(MODEL)
        generator = torch.Generator(CUDA).manual_seed(5)
        tensors = {}
        for name, shape in expected_shapes(self.config).items():
            values = torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)
            tensors[name] = values * 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else 1 + values / 8
        tensors["model.embed_tokens.weight"] *= 20
        self.page = page_tokens
        self.num_pages = POOL_TOKENS // page_tokens
        self.pages = PagePools(page_layouts(self.config, kv_dtype, page_tokens), [self.num_pages], page_tokens, CUDA)
        limits = RunnerLimits(MAX_MATES + 2, MAX_TOKENS * 2, invariance, graphs=True)
        self.runner = Runner(Decoder(self.config, LoadedTensors(tensors), CUDA), self.pages, CUDA, limits)
        self.clear(random.Random(0))

    def clear(self, source: random.Random) -> None:
        """Nobody owns a page; what is in them must never be read."""
        for layer in range(len(self.config.layers)):
            for pages in self.pages.layer_pages(layer).planes:
                pages[1:].fill_(torch.nan)
        self._free = list(range(1, self.num_pages + 1))
        source.shuffle(self._free)

    def deal(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.page)
        dealt, self._free = self._free[:count], self._free[count:]
        assert len(dealt) == count
        return dealt

    def batch(self, *parts: Part, num_decode: int | None = None) -> Batch:
        rows = [Row(part.sequence, part.first, part.end - part.first) for part in parts]  # type: ignore[arg-type]
        decode = sum(part.end - part.first == 1 for part in parts) if num_decode is None else num_decode
        return build_batch(rows, decode, self.pages.specs(), self.page)

    def new_sequence(self, tokens: list[int]) -> PagedTokens:
        return self.sequence(tokens, self.deal(len(tokens)))


def drawn_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(MODEL["vocab_size"]) for _ in range(count)]


def drawn_cuts(source: random.Random, first: int, end: int) -> list[int]:
    """Where chunks begin and end; a lone token cannot be a chunk here, as it would decode."""
    cuts = sorted({first, end, *(source.randint(first, end) for _ in range(source.randint(0, 4)))})
    return [cut for cut in cuts if cut in (first, end) or (cut - first > 1 and end - cut > 1)]


@pytest.fixture(scope="module", params=[16, 128], ids="page{}".format)
def strict_world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield World(request.param, Invariance.STRICT)
    torch.cuda.empty_cache()


WORLDS = {
    **{f"page{page_tokens}": (page_tokens, torch.bfloat16) for page_tokens in (16, 32, 128, 1)},
    "page16-fp8": (16, E4M3),
}


@pytest.fixture(scope="module", params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    page_tokens, kv_dtype = WORLDS[request.param]
    yield World(page_tokens, kv_dtype=kv_dtype)
    torch.cuda.empty_cache()


class Case:
    """A prompt, its logits when it is computed whole and alone, and company for its launches."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.source = world, random.Random(seed)
        world.clear(self.source)
        self.prompt = drawn_tokens(self.source, self.source.choice([2, 17, 130, 700, MAX_TOKENS]))
        self.cold = world.new_sequence(self.prompt)
        self.wanted = world.all_logits(Part(self.cold, 0, len(self.prompt)), num_decode=0)
        assert torch.isfinite(self.wanted).all()

    def neighbours(self) -> tuple[list[Part], list[Part]]:
        """Decode rows and chunks of other prompts, each with what came before it computed."""
        decoding, chunks = [], []
        for _ in range(self.source.randint(0, MAX_MATES)):
            length = self.source.randint(2, 90)
            sequence = self.world.new_sequence(drawn_tokens(self.source, length))
            first = self.source.choice([0, length // 2, length - 1])
            if first:
                self.world.all_logits(Part(sequence, 0, first), num_decode=0)
            (decoding if length - first == 1 else chunks).append(Part(sequence, first, length))
        return decoding, chunks

    def in_company(self, part: Part) -> torch.Tensor:
        """The part's logits in a launch with others before and behind it."""
        decoding, chunks = self.neighbours()
        place = self.source.randint(0, len(chunks))
        parts = [*decoding, *chunks[:place], part, *chunks[place:]]
        before = sum(entry.end - entry.first for entry in parts[: parts.index(part)])
        logits = self.world.all_logits(*parts, num_decode=len(decoding))
        return logits[before : before + part.end - part.first]

    def prefix_pages(self, num_pages: int) -> list[int]:
        """Pages that hold the prompt's first tokens: the cold run's, such as were fetched, or computed in company."""
        if not num_pages:
            return []
        kind = self.source.choice(["cached", "fetched", "computed"])
        cached = list(self.cold.tables[0][:num_pages])
        if kind == "cached":
            return cached
        ids = self.world.deal(num_pages * self.world.page)
        if kind == "fetched":
            self.world.pages.write_pages(0, ids, self.world.pages.read_pages(0, cached))
            return ids
        sequence = self.world.sequence(self.prompt[: num_pages * self.world.page], ids)
        for first, end in pairwise(drawn_cuts(self.source, 0, len(sequence.tokens))):
            self.in_company(Part(sequence, first, end))
        return ids


@pytest.mark.parametrize("seed", range(CASES))
def test_prefill_gives_the_cold_logits(world: World, seed: int) -> None:
    case = Case(world, seed)
    length = len(case.prompt)
    num_pages = case.source.randint(0, (length - 2) // world.page)
    table = case.prefix_pages(num_pages)
    warm = world.sequence(case.prompt, [*table, *world.deal(length - num_pages * world.page)])
    for first, end in pairwise(drawn_cuts(case.source, num_pages * world.page, length)):
        got = case.in_company(Part(warm, first, end))
        assert torch.equal(got, case.wanted[first:end]), f"tokens {first} to {end}, prefix of {num_pages} pages"


@pytest.mark.parametrize("seed", range(CASES))
def test_decoding_gives_the_same_logits_in_any_company(world: World, seed: int) -> None:
    """Three tokens behind the prompt: alone, captured and not, beside other decode rows, and beside prompts."""
    case = Case(world, 100 + seed)
    prefix_len = len(case.prompt)
    tokens = [*case.prompt, *drawn_tokens(case.source, 3)]
    ways: list[list[torch.Tensor]] = []
    for way in range(3):
        sequence = world.new_sequence(tokens)
        for first, end in pairwise(drawn_cuts(case.source, 0, prefix_len)):
            case.in_company(Part(sequence, first, end))
        logits = []
        for first in range(prefix_len, len(tokens)):
            part = Part(sequence, first, first + 1)
            sequence.tokens = sequence.tokens[: first + 1]
            decoding, chunks = case.neighbours() if way else ([], [])
            parts = [*decoding, part, *(chunks if way == 2 else [])]
            logits.append(world.runner.logits(world.batch(*parts))[len(decoding)])
            sequence.tokens.extend(tokens[first + 1 :])
        ways.append(logits)
    for others in ways[1:]:
        assert all(torch.equal(one, other) for one, other in zip(ways[0], others, strict=True))


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
