"""Keys and values in fp8 pages: what is rounded, and that a prefix has the same bits however it was obtained."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.fp8 import E4M3, dequantise, quantise
from tests.worker_service.model_kit import PAGE, Bench, Part, make_reference, random_tokens
from worker_service.core.errors import ModelError
from worker_service.model import attention
from worker_service.model.config import read_model_spec
from worker_service.model.kv_scales import KvScales
from worker_service.model.mixers import Heads
from worker_service.model.page_layouts import page_layouts

# Each way in which keys, values and scores are made: biases, norms, rotations, windows, sinks, caps, padded values.
FAMILIES = (
    "llama-biases-linear",
    "llama-wide-heads-yarn",
    "qwen3-tied-windows",
    "mistral-window-7",
    "gpt-oss",
    "gemma2",
    "mimo-v2",
    "cohere2",
    "glm4-moe",
)
LENGTH = 3 * PAGE + 5
PAGES = [7, 3, 9, 1]
# Of a value's size: with 3 bits of mantissa the nearest e4m3 number is at most half of 2^-3 away.
HALF_STEP = 2.0**-4
# Of the scale: half of the step between the least numbers.
LEAST_HALF_STEP = 2.0**-10


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_reference(request.param, made)
    return made


def fp8(folder: Path) -> Bench:
    return Bench(folder, kv_dtype=E4M3)


def part(bench: Bench, tokens: list[int], pages: list[int], start: int = 0) -> Part:
    return Part(bench.sequence(tokens, pages), start, len(tokens))


def whole(bench: Bench, tokens: list[int]) -> torch.Tensor:
    return bench.all_logits(part(bench, tokens, PAGES))


class Rounding:
    """fp32 pages that get what fp8 pages would hold. `rows` has each launch's keys or values before, their scale, and
    what became of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._scales: KvScales | None = None
        self._append: Callable[..., Any] = attention.rotate_append_kv
        monkeypatch.setattr(attention, "rotate_append_kv", self._rounded)
        attend = attention.PagedHeads.__call__

        def seen(paged: attention.PagedHeads, layer: int, heads: Heads) -> torch.Tensor:
            self._scales = heads.scales
            return attend(paged, layer, heads)

        monkeypatch.setattr(attention.PagedHeads, "__call__", seen)

    def _rounded(self, qkv: Any, at: Any, table: Any, k: torch.Tensor, v: torch.Tensor, slots: Any, **more: Any) -> Any:
        assert self._scales is not None
        queries = self._append(qkv, at, table, k, v, slots, **more)
        for pages, scale in zip((k, v), self._scales, strict=True):
            assert scale is not None
            rows = pages.flatten(0, 1)[slots]
            rounded = dequantise(quantise(rows, scale), scale, rows.dtype)
            pages.flatten(0, 1)[slots] = rounded
            self.rows.append((rows, scale, rounded))
        return queries


def test_logits_are_those_of_rounded_keys_and_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; each rounding is at most half a step of e4m3, and a layer moves the logits by no larger share."""
    tokens = random_tokens(LENGTH, 1)
    bench = fp8(folder)
    actual, exact = whole(bench, tokens), whole(Bench(folder), tokens)
    rounding = Rounding(monkeypatch)
    assert torch.equal(actual, whole(Bench(folder), tokens))
    num_layers = len(bench.config.layers)
    assert len(rounding.rows) == 2 * num_layers
    for rows, scale, rounded in rounding.rows:
        assert ((rounded - rows).abs() <= torch.maximum(HALF_STEP * rows.abs(), LEAST_HALF_STEP * scale)).all()
    moved = (actual - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.0 < moved <= num_layers * HALF_STEP


@pytest.mark.parametrize("chunk", [1, PAGE + 1])
def test_cuts_do_not_matter(folder: Path, chunk: int) -> None:
    tokens = random_tokens(LENGTH, 2)
    wanted = whole(fp8(folder), tokens)
    bench = fp8(folder)
    sequence = bench.sequence(tokens, [4, 8, 2, 6])
    cuts = [*range(0, LENGTH, chunk), LENGTH]
    actual = [bench.all_logits(Part(sequence, *cut), num_decode=0) for cut in pairwise(cuts)]
    assert torch.equal(torch.cat(actual), wanted)


def test_sources_of_a_prefix_do_not_matter(folder: Path) -> None:
    """A hit, pages that another worker fetched as bytes under other ids, and pages behind the windows gone."""
    tokens, start = random_tokens(LENGTH, 3), 3 * PAGE
    writer, reader = fp8(folder), fp8(folder)
    wanted = whole(writer, tokens)[start:]
    hit = writer.sequence(tokens, [*PAGES[:3], 20])
    assert torch.equal(writer.all_logits(Part(hit, start, LENGTH)), wanted)
    tables = []
    for group, spec in enumerate(writer.pages.specs()):
        reader.pages.write_pages(group, [30, 10, 20], writer.pages.read_pages(group, PAGES[:3]))
        oldest = max(start - spec.window_tokens + 1, 0) // PAGE if spec.window_tokens else 0
        tables.append([0] * oldest + [30, 10, 20, 5][oldest:])
    fetched = reader.sequence(tokens, *tables)
    assert torch.equal(reader.all_logits(Part(fetched, start, LENGTH)), wanted)


def test_neighbours_do_not_matter(folder: Path) -> None:
    """Two decode rows, a chunk behind a prefix and a fresh prompt, alone and in one launch."""
    prompts = [random_tokens(length, length) for length in (33, 47, 40, 21)]
    starts = [32, 46, 17, 0]
    alone, together = [], fp8(folder)
    parts = []
    for place, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        pages = [3 * place + 1, 3 * place + 3, 3 * place + 2]
        single = fp8(folder)
        for bench in (single, together):
            if start:
                bench.all_logits(part(bench, prompt[:start], pages))
        alone.append(single.all_logits(part(single, prompt, pages, start)))
        parts.append(part(together, prompt, pages, start))
    assert torch.equal(together.all_logits(*parts), torch.cat(alone))


@pytest.mark.parametrize(("name", "factor"), [("k_proj", 2.0**12), ("k_proj", 2.0**-14), ("v_proj", 2.0**-14)])
def test_the_size_of_keys_and_values_does_not_matter(tmp_path: Path, name: str, factor: float) -> None:
    """By a power of two, which queries or outputs take back: pages hold the same bits, and logits are the same."""
    make_reference("llama", tmp_path)
    tokens = random_tokens(LENGTH, 4)
    bench = fp8(tmp_path)
    wanted, page = whole(bench, tokens), bench.pages.read_pages(0, PAGES[:3])
    tensors = load_file(tmp_path / "model.safetensors")
    for tensor in tensors:
        if name in tensor:
            tensors[tensor] *= factor
        elif ("q_proj" if name == "k_proj" else "o_proj") in tensor:
            tensors[tensor] /= factor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    scaled = fp8(tmp_path)
    assert torch.equal(whole(scaled, tokens), wanted)
    assert torch.equal(scaled.pages.read_pages(0, PAGES[:3]), page)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("deepseek-v2-lite", "DeepseekV2ForCausalLM keeps latents"),
        ("deepseek-v4", "DeepseekV4ForCausalLM keeps entries that are key and value at once"),
    ],
)
def test_what_is_key_and_value_at_once_refuses_fp8(name: str, kept: str, tmp_path: Path) -> None:
    make_reference(name, tmp_path)
    with pytest.raises(ModelError, match=f"kv_dtype.*{kept}"):
        page_layouts(read_model_spec(tmp_path), torch.bfloat16, 128, kv_dtype=E4M3)
