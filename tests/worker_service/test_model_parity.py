"""Logits of every family against the Hugging Face classes, fp32, however a prompt is cut, shared, mixed or moved."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.examples import thorough
from tests.worker_service.model_kit import MODELS, Bench, Part, make_reference, page_of, random_tokens
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import Decoder

TOLERANCE = 1e-5
# Of a delta rule, whose states depend on those before: a step's roundings, which are a CPU's own, go on through all
# later ones. Qwen3-Next in chunks of one token is off by 1.05e-5 of its largest logit on one kind of CPU.
DELTA_TOLERANCE = 5e-5
DELTA_MODELS = ("qwen3-next", "qwen3.5", "kimi")


class Pair:
    """One model twice: the Hugging Face class and the folder that it was saved to."""

    def __init__(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.mktemp(name)
        self.reference: Any = make_reference(name, self.folder)
        self.page = page_of(read_model_spec(self.folder))
        self.length = 3 * self.page + 5
        self.tolerance = DELTA_TOLERANCE if name.startswith(DELTA_MODELS) else TOLERANCE
        self._model: Decoder | None = None
        self._wanted: dict[tuple[int, ...], torch.Tensor] = {}

    def bench(self) -> Bench:
        """Pages of its own for the model, which is loaded once."""
        bench = Bench(self.folder, model=self._model)
        self._model = bench.model
        return bench

    def wanted(self, tokens: list[int]) -> torch.Tensor:
        """Returns the reference's logits; several tests ask for those of one prompt."""
        key = tuple(tokens)
        if key not in self._wanted:
            with torch.no_grad():
                self._wanted[key] = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return self._wanted[key]

    def assert_close(self, actual: torch.Tensor, wanted: torch.Tensor) -> None:
        assert actual.shape == wanted.shape
        assert (actual - wanted).abs().max().item() <= self.tolerance * max(1.0, wanted.abs().max().item())


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory)


def test_whole_prompt(pair: Pair) -> None:
    tokens = random_tokens(pair.length, 1)
    bench = pair.bench()
    pair.assert_close(bench.all_logits(Part(bench.sequence(tokens, [7, 3, 9, 1]), 0, pair.length)), pair.wanted(tokens))


@pytest.mark.parametrize(("pages", "more"), [thorough(0, 1), (1, -1), (1, 0), (1, 1)])
def test_chunks(pair: Pair, pages: int, more: int) -> None:
    tokens, chunk = random_tokens(pair.length, 2), pages * pair.page + more
    bench = pair.bench()
    pair.assert_close(bench.chunked_logits(bench.sequence(tokens, [4, 8, 2, 6]), chunk), pair.wanted(tokens))


def test_single_tokens_around_the_ends_of_pages(pair: Pair) -> None:
    """One at a time over the first page and into the second, and around each later page's end; the rest in chunks."""
    tokens, bench = random_tokens(pair.length, 2), pair.bench()
    singles = {*range(pair.page + 4), *(3 * pair.page + at for at in range(5))}
    singles |= {2 * pair.page + at for at in range(-3, 4)}
    cuts = sorted({0, pair.length, *singles, *(at + 1 for at in singles)})
    sequence = bench.sequence(tokens, [4, 8, 2, 6])
    logits = [bench.all_logits(Part(sequence, first, end)) for first, end in pairwise(cuts)]
    pair.assert_close(torch.cat(logits), pair.wanted(tokens))


def test_after_a_prefix_hit(pair: Pair) -> None:
    """A second sequence goes on behind two pages that the first one wrote."""
    first = random_tokens(pair.length, 3)
    second = first[: 2 * pair.page] + random_tokens(20, 4)
    bench = pair.bench()
    bench.all_logits(Part(bench.sequence(first, [11, 5, 12, 13]), 0, pair.length))
    hit = bench.sequence(second, [11, 5, 20, 21])
    pair.assert_close(bench.all_logits(Part(hit, 2 * pair.page, len(second))), pair.wanted(second)[2 * pair.page :])


def test_pages_behind_a_window_may_be_gone(pair: Pair) -> None:
    """A window group's hole is page 0; what the window still covers is enough."""
    tokens = random_tokens(pair.length, 5)
    bench = pair.bench()
    bench.all_logits(Part(bench.sequence(tokens, [1, 2, 3, 4]), 0, 3 * pair.page))
    tables = []
    for spec in bench.pages.specs():
        oldest = max(3 * pair.page - spec.window_tokens + 1, 0) // pair.page if spec.window_tokens else 0
        tables.append([0] * oldest + [1, 2, 3, 4][oldest:])
    rest = bench.sequence(tokens, *tables)
    pair.assert_close(bench.all_logits(Part(rest, 3 * pair.page, pair.length)), pair.wanted(tokens)[3 * pair.page :])


def test_mixed_batch(pair: Pair) -> None:
    """Two decode rows, a chunk behind a cached prefix, a fresh prompt and a prompt of one token, in one launch."""
    prompts = [random_tokens(length, 10 + length) for length in (33, 47, 40, 21, 1)]
    starts = [32, 46, 17, 0, 0]
    bench = pair.bench()
    sequences = [
        bench.sequence(prompt, [3 * place + 1, 3 * place + 3, 3 * place + 2]) for place, prompt in enumerate(prompts)
    ]
    for sequence, start in zip(sequences, starts, strict=True):
        if start:
            bench.all_logits(Part(sequence, 0, start))
    parts = [Part(sequence, start, len(sequence.tokens)) for sequence, start in zip(sequences, starts, strict=True)]
    actual = bench.all_logits(*parts, num_decode=2)
    wanted = [pair.wanted(prompt)[start:] for prompt, start in zip(prompts, starts, strict=True)]
    pair.assert_close(actual, torch.cat(wanted))


def test_after_pages_were_fetched(pair: Pair) -> None:
    """Pages leave one worker as bytes and go on on another, under other ids."""
    tokens = random_tokens(pair.length, 6)
    writer, reader = pair.bench(), pair.bench()
    writer.all_logits(Part(writer.sequence(tokens, [1, 2, 3, 4]), 0, 3 * pair.page))
    for group in range(writer.pages.num_groups):
        reader.pages.write_pages(group, [30, 10, 20], writer.pages.read_pages(group, [1, 2, 3]))
    fetched = reader.sequence(tokens, [30, 10, 20, 5])
    pair.assert_close(
        reader.all_logits(Part(fetched, 3 * pair.page, pair.length)), pair.wanted(tokens)[3 * pair.page :]
    )


def test_rows_do_not_depend_on_their_neighbours(pair: Pair) -> None:
    """Greedy tokens of four prompts are the same alone and together."""
    prompts = [random_tokens(length, length) for length in (19, 30, 5, 44)]
    pages = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    together, alone = pair.bench(), pair.bench()
    parts = [
        Part(together.sequence(prompt, table), 0, len(prompt)) for prompt, table in zip(prompts, pages, strict=True)
    ]
    single = [
        alone.run(Part(alone.sequence(prompt, table), 0, len(prompt))).token_ids[0]
        for prompt, table in zip(prompts, pages, strict=True)
    ]
    assert list(together.run(*parts).token_ids) == single
    assert single == [int(pair.wanted(prompt)[-1].argmax()) for prompt in prompts]
