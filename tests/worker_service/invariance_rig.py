"""A model whose pages are dealt at random and poisoned between owners, and prompts computed in every way.

For tests of what docs/invariance.md promises: the reference is the whole prompt computed alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import torch

from tests.worker_service.loaded_tensors import LoadedTensors, StoredAs
from tests.worker_service.model_kit import MEMORY, NUM_WORKING, Bench, PagedTokens, Part, num_pages_of, page_of
from worker_service.gpu.page_pools import PagePools
from worker_service.model.config import parse_model_spec
from worker_service.model.decoder import Decoder, expected_tensors
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import Runner, RunnerLimits
from worker_service.model.spec import STATE_PAGE_TOKENS, ModelSpec, MoeSpec

MAX_MATES = 6
VOCAB = 4096


class Scale(NamedTuple):
    """How much a world computes: the pool's tokens, and the lengths of its prompts, the longest last."""

    pool_tokens: int = 16_384
    lengths: tuple[int, ...] = (2, 17, 130, 700, 1_400)


class World(Bench):
    """A model of random weights and a pool of pages; `fields` are its config.json, `dtype` that of both
    unless the pages have one of their own, `experts` what its experts are stored as."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        page_tokens: int,
        invariance: Invariance,
        device: torch.device,
        dtype: torch.dtype,
        scale: Scale,
        kv_dtype: torch.dtype | None = None,
        experts: StoredAs | None = None,
    ) -> None:
        self.config = parse_model_spec(fields)
        self.scale = scale
        self.page = page_tokens
        # Scans promise bits for cuts at multiples of their grid, which is a page of such a model.
        self.grid = page_tokens if page_of(self.config) == STATE_PAGE_TOKENS else 1
        self.num_pages = scale.pool_tokens // page_tokens
        layouts = page_layouts(self.config, dtype, page_tokens, kv_dtype)
        self.pages = PagePools(layouts, num_pages_of(layouts, self.num_pages), page_tokens, device)
        limits = RunnerLimits(MAX_MATES + 2, scale.lengths[-1] * 2, invariance, graphs=True)
        source = LoadedTensors(self._tensors(device, dtype), experts)
        self.runner = Runner(Decoder(self.config, source, device), self.pages, device, limits)
        self.clear(random.Random(0))

    def _tensors(self, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Sharp attention and spread embeddings, so that a wrong page shows."""
        generator = torch.Generator(device).manual_seed(5)
        tensors = {}
        for name, (shape, wide) in expected_tensors(self.config).items():
            values = torch.randn(shape, generator=generator, device=device)
            made = values * 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 1 + values / 8
            if name.endswith("A_log"):
                made -= MEMORY
            if name.endswith("tid2eid"):
                made = chosen_experts(shape, self.config, generator)
            tensors[name] = made.to(torch.float32 if wide else dtype)
        tensors["model.embed_tokens.weight"] *= 20
        return tensors

    def clear(self, source: random.Random) -> None:
        """Nobody owns a page; what is in them must never be read."""
        for layer in range(len(self.config.layers)):
            for pages in self.pages.planes(layer):
                pages[1:].fill_(torch.nan)
        self._free = list(range(1, self.num_pages + 1))
        source.shuffle(self._free)
        working = list(range(self.num_pages + 1, self.num_pages + NUM_WORKING + 1))
        source.shuffle(working)
        self._working = cycle(working)

    def deal(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.page)
        dealt, self._free = self._free[:count], self._free[count:]
        assert len(dealt) == count
        return dealt

    def new_sequence(self, tokens: list[int]) -> PagedTokens:
        return self.sequence(tokens, self.deal(len(tokens)))


def chosen_experts(shape: tuple[int, ...], spec: ModelSpec, generator: torch.Generator) -> torch.Tensor:
    """Returns the experts of each token of the vocabulary, of layers that choose by token: no expert twice."""
    num_experts = max(layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, MoeSpec))
    scores = torch.rand(shape[0], num_experts, generator=generator, device=generator.device)
    return scores.topk(shape[1]).indices


def drawn_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCAB) for _ in range(count)]


def drawn_cuts(source: random.Random, first: int, end: int, grid: int = 1) -> list[int]:
    """Where chunks begin and end, at multiples of the grid; a lone token cannot be a chunk here, as it would decode."""
    drawn = (source.randint(first, end) // grid * grid for _ in range(source.randint(0, 4)))
    return [first, *sorted({cut for cut in drawn if cut - first > 1 and end - cut > 1}), end]


class Case:
    """A prompt, its logits when it is computed whole and alone, and other rows for its launches."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.source = world, random.Random(seed)
        world.clear(self.source)
        self.prompt = drawn_tokens(self.source, self.source.choice(world.scale.lengths))
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
        """Pages that hold the prompt's first tokens: the cold run's, such as were fetched, or computed in a batch."""
        if not num_pages:
            return []
        kind = self.source.choice(["cached", "fetched", "computed"])
        cached = list(self.cold.tables[0][:num_pages])
        if kind == "cached":
            return cached
        ids = self.world.deal(num_pages * self.world.page)
        if kind == "fetched":
            for group in range(self.world.pages.num_groups):
                self.world.pages.write_pages(group, ids, self.world.pages.read_pages(group, cached))
            return ids
        sequence = self.world.sequence(self.prompt[: num_pages * self.world.page], ids)
        for first, end in pairwise(drawn_cuts(self.source, 0, len(sequence.tokens), self.world.grid)):
            self.in_company(Part(sequence, first, end))
        return ids


def check_prefill(world: World, seed: int) -> None:
    """A prompt behind a prefix, cut at random and in random batches, has the bits of the cold run."""
    case = Case(world, seed)
    length = len(case.prompt)
    num_pages = case.source.randint(0, (length - 2) // world.page)
    table = case.prefix_pages(num_pages)
    warm = world.sequence(case.prompt, [*table, *world.deal(length - num_pages * world.page)])
    for first, end in pairwise(drawn_cuts(case.source, num_pages * world.page, length, world.grid)):
        got = case.in_company(Part(warm, first, end))
        assert torch.equal(got, case.wanted[first:end]), f"tokens {first} to {end}, prefix of {num_pages} pages"


def check_decoding(world: World, seed: int) -> None:
    """Three tokens behind a prompt: alone, captured and not, beside other decode rows, and beside prompts."""
    case = Case(world, 100 + seed)
    prefix_len = len(case.prompt)
    tokens = [*case.prompt, *drawn_tokens(case.source, 3)]
    ways: list[list[torch.Tensor]] = []
    for way in range(3):
        sequence = world.new_sequence(tokens)
        for first, end in pairwise(drawn_cuts(case.source, 0, prefix_len, world.grid)):
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


def check_repeats(world: World, num_launches: int) -> None:
    """The longest prompt again and again, in the same pages: logits with the same bits each time.

    Memory that is refilled before it was read, or read before it was filled, shows in a launch in twenty, or in none.
    """
    source = random.Random(0)
    world.clear(source)
    prompt = drawn_tokens(source, world.scale.lengths[-1])
    pages = world.deal(len(prompt))

    def launch() -> torch.Tensor:
        return world.all_logits(Part(world.sequence(prompt, pages), 0, len(prompt)), num_decode=0)

    wanted = launch().clone()
    # Counted on the device, so that no launch waits for the host.
    num_wrong = torch.zeros((), dtype=torch.int64, device=wanted.device)
    for _ in range(num_launches):
        num_wrong += (launch() != wanted).any()
    assert num_wrong.item() == 0
