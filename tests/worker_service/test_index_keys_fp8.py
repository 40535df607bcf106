"""Index keys as fp8 with a scale a token: what is chosen is chosen by what pages hold, cold, hit and fetched alike.

Queries are rounded with them, with a scale for each head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from kernels.fp8 import dequantise, quantise, token_scales
from tests.worker_service.model_kit import PAGE, Bench, Part, make_reference, random_tokens
from worker_service.core.errors import ModelError
from worker_service.gpu.group_layout import MIXED_DTYPES
from worker_service.model.config import read_model_spec
from worker_service.model.page_layouts import page_layouts

E4M3 = torch.float8_e4m3fn
LENGTH = 75
PAGES = (5, 2, 9, 7, 1)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("deepseek-v32")
    return folder, make_reference("deepseek-v32", folder)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """What e4m3 and a scale for each row make of rows [..., dim]."""
    scales = token_scales(rows).unsqueeze(-1)
    return dequantise(quantise(rows, scales), scales, torch.float32)


class RoundedKeys(DynamicCache):
    """transformers' cache, whose index keys are what fp8 pages give back."""

    def update_indexer(self, keys: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        kept: torch.Tensor = super().update_indexer(keys, *args, **options)
        return rounded(kept)


class RoundedQueries(TorchFunctionMode):
    """Rounds the queries of transformers' indexer, the left factor of its only product over one key for all heads."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.matmul and args[0].dim() == args[1].dim() == 4 and args[1].shape[1] == 1:
            args = (rounded(args[0]), args[1])
        return function(*args, **(kwargs or {}))


def whole(bench: Bench) -> torch.Tensor:
    return bench.all_logits(Part(bench.sequence(random_tokens(LENGTH, 1), PAGES), 0, LENGTH))


def test_logits_are_those_of_an_indexer_with_rounded_keys_and_queries(saved: tuple[Path, Any]) -> None:
    folder, reference = saved
    tokens = torch.tensor([random_tokens(LENGTH, 1)])
    with torch.no_grad():
        exact = reference(tokens, use_cache=False).logits[0]
        keys_only = reference(tokens, past_key_values=RoundedKeys(config=reference.config)).logits[0]
        with RoundedQueries():
            wanted = reference(tokens, past_key_values=RoundedKeys(config=reference.config)).logits[0]
    for other in (exact, keys_only):
        assert (wanted - other).abs().max() > 1e-2, "rounding changes no choice: nothing is tested"
    got = whole(Bench(folder, index_dtype=E4M3))
    assert (got - wanted).abs().max().item() <= TOLERANCE * max(1.0, wanted.abs().max().item())


def test_bits_do_not_depend_on_cuts_hits_and_fetches(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    writer, reader = (Bench(folder, index_dtype=E4M3) for _ in range(2))
    cold = whole(writer)
    chunked = Bench(folder, index_dtype=E4M3)
    assert torch.equal(chunked.chunked_logits(chunked.sequence(random_tokens(LENGTH, 1), PAGES), PAGE + 1), cold)
    reader.pages.write_pages(0, [30, 11], writer.pages.read_pages(0, list(PAGES[:2])))
    for bench, table in ((writer, [*PAGES[:2], 20, 21, 22]), (reader, [30, 11, 20, 21, 22])):
        hit = bench.all_logits(Part(bench.sequence(random_tokens(LENGTH, 1), table), 2 * PAGE, LENGTH))
        assert torch.equal(hit, cold[2 * PAGE :])


def test_a_page_holds_latents_keys_and_scales(saved: tuple[Path, Any]) -> None:
    (layout,) = page_layouts(read_model_spec(saved[0]), torch.bfloat16, 64, index_dtype=E4M3)
    tensors = [(tensor.page_shape, tensor.dtype) for tensor in layout.tensors]
    assert tensors == [((64, 40), torch.bfloat16), ((64, 16), E4M3), ((64,), torch.float32)]
    assert layout.page_bytes == 3 * 64 * (40 * 2 + 16 + 4)
    assert layout.dtype_code == MIXED_DTYPES


def test_workers_exchange_only_pages_of_one_kind(saved: tuple[Path, Any]) -> None:
    """The layout's id is a part of the fingerprint."""
    plain, rounded = Bench(saved[0]).pages, Bench(saved[0], index_dtype=E4M3).pages
    assert rounded.page_bytes(0) < plain.page_bytes(0)
    assert "float8_e4m3fn" in rounded.layout_id and rounded.layout_id != plain.layout_id


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek-v3", "DeepseekV3ForCausalLM has none"),
        ("deepseek-v4", "DeepseekV4ForCausalLM chooses entries, whose index keys are not supported in it"),
    ],
)
def test_it_is_refused_where_no_tokens_are_chosen(name: str, why: str, tmp_path: Path) -> None:
    make_reference(name, tmp_path)
    with pytest.raises(ModelError, match=rf"index_key_dtype.*{why}"):
        page_layouts(read_model_spec(tmp_path), torch.bfloat16, PAGE, index_dtype=E4M3)
