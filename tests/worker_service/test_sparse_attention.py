"""Sparse attention in the worker: bits depend neither on cuts nor on the batch, a cached prefix is searched (R24, R25).

That its logits are right is in tests/worker_service/test_model_parity.py.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels.mla.sparse
from kernels.fp8 import E4M3
from kernels.rotate_append_index import IndexQueries
from tests.worker_service.kept_bytes import KeptBytes
from tests.worker_service.model_kit import PAGE, Bench, Part, make_reference, random_tokens
from worker_service.model import choice_parts, sparse_attention
from worker_service.model.config import read_model_spec
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import RunnerLimits
from worker_service.model.sparse_attention import sparse_workspace_bytes

LENGTH = 75
PAGES = (5, 2, 9, 7, 1)
NAMES = ("deepseek-v32", "glm-dsa")


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_reference(request.param, folder)
    return folder


def in_parts(bench: Bench, *cuts: int) -> torch.Tensor:
    sequence = bench.sequence(random_tokens(LENGTH, 1), PAGES)
    bounds = pairwise((0, *cuts, LENGTH))
    return torch.cat([bench.all_logits(Part(sequence, first, end)) for first, end in bounds])


@pytest.mark.parametrize("invariance", list(Invariance))
def test_bits_do_not_depend_on_the_cut(folder: Path, invariance: Invariance) -> None:
    """A part of one token is a decode row: also that changes nothing, in any invariance."""
    limits = RunnerLimits(invariance=invariance)
    whole = in_parts(Bench(folder, limits=limits))
    for cuts in ((1, 2, 3), (13, 14, 40), (PAGE - 1, PAGE, PAGE + 1), tuple(range(60, LENGTH)), (74,)):
        assert torch.equal(in_parts(Bench(folder, limits=limits), *cuts), whole), cuts


def test_neighbours_change_nothing(folder: Path) -> None:
    """A decode row, a chunk behind a cached prefix and a fresh prompt, in one launch and each alone."""
    prompts = [random_tokens(length, length) for length in (50, 61, 30)]
    starts = (49, 33, 0)
    tables = [[4 * place + 1, 4 * place + 2, 4 * place + 3, 4 * place + 4] for place in range(3)]

    def parts(bench: Bench) -> list[Part]:
        sequences = [bench.sequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
        for sequence, start in zip(sequences, starts, strict=True):
            if start:
                bench.all_logits(Part(sequence, 0, start))
        return [Part(sequence, start, len(sequence.tokens)) for sequence, start in zip(sequences, starts, strict=True)]

    together, alone = Bench(folder), Bench(folder)
    mixed = together.all_logits(*parts(together), num_decode=1)
    single = torch.cat([alone.all_logits(part) for part in parts(alone)])
    assert torch.equal(mixed, single)


def test_a_hit_has_the_bits_of_the_cold_run(folder: Path) -> None:
    """On the worker that computed the prefix, and on one that fetched it: latents and index keys go in one page."""
    writer, reader = Bench(folder), Bench(folder)
    cold = in_parts(writer)
    for group in range(writer.pages.num_groups):
        reader.pages.write_pages(group, [30, 11], writer.pages.read_pages(group, list(PAGES[:2])))
    tokens = random_tokens(LENGTH, 1)
    for bench, table in ((writer, [*PAGES[:2], 20, 21, 22]), (reader, [30, 11, 20, 21, 22])):
        hit = bench.all_logits(Part(bench.sequence(tokens, table), 2 * PAGE, LENGTH))
        assert torch.equal(hit, cold[2 * PAGE :])


def test_the_choice_matters(folder: Path) -> None:
    """With room for all tokens the logits differ as soon as a query sees more than are chosen, and no sooner."""
    sparse = in_parts(Bench(folder))
    config = json.loads((folder / "config.json").read_text())
    index_topk = config["index_topk"]
    try:
        (folder / "config.json").write_text(json.dumps({**config, "index_topk": LENGTH}))
        dense = in_parts(Bench(folder))
    finally:
        (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(sparse[:index_topk], dense[:index_topk])
    changed = (sparse - dense).abs().amax(-1)[index_topk:]
    assert (changed > 1e-3).float().mean().item() > 0.9


def test_rows_are_chosen_a_few_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workspace holds changes no bit."""
    whole = in_parts(Bench(folder))
    monkeypatch.setattr(choice_parts, "LOGITS_BYTES", 4 * LENGTH * 7)
    assert torch.equal(in_parts(Bench(folder)), whole)
    monkeypatch.setattr(choice_parts, "MOST_ROWS", 2)
    assert torch.equal(in_parts(Bench(folder)), whole)


def test_pages_hold_latents_and_index_keys(folder: Path) -> None:
    """A layer that takes another one's choice has no keys."""
    spec = read_model_spec(folder)
    layouts = page_layouts(spec, torch.bfloat16, PAGE)
    shapes = {layout.layers: [tensor.page_shape for tensor in layout.tensors] for layout in layouts}
    both, latents = [(PAGE, 40), (PAGE, 16)], [(PAGE, 40)]
    wanted = {(0, 1, 2): both} if len(spec.layers) == 3 else {(0, 2): both, (1, 3): latents}
    assert shapes == wanted
    assert all(layout.page_bytes == len(layout.layers) * PAGE * 2 * sum(
        shape[-1] for shape in shapes[layout.layers]
    ) for layout in layouts)  # fmt: skip


@pytest.mark.parametrize(("index_dtype", "queries"), [(None, 16 * 2 + 4), (E4M3, 16 * 2 + 4 + 16 + 4)])
def test_the_workspace_is_that_of_logits_choices_and_queries(
    folder: Path, tmp_path: Path, index_dtype: torch.dtype | None, queries: int
) -> None:
    spec = read_model_spec(folder)
    top_k = sparse_attention.sparse_mixers(spec)[0].indexer.top_k
    wanted = 2 * (768 << 20) + 2000 * (16 * queries + top_k * 4) + 1024 * 4 * (40 + 32) * 2
    assert sparse_workspace_bytes(spec, 2000, torch.bfloat16, index_dtype) == wanted
    make_reference("llama", tmp_path)
    assert sparse_workspace_bytes(read_model_spec(tmp_path), 2000, torch.bfloat16, index_dtype) == 0


@pytest.mark.parametrize("index_dtype", [None, E4M3])
def test_a_launch_keeps_what_the_workspace_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, index_dtype: torch.dtype | None
) -> None:
    """Beside logits: an indexer's queries, choices, absorbed queries and what attention makes of them."""
    kept = KeptBytes(monkeypatch)

    def index_queries(call: Any, made: IndexQueries) -> list[torch.Tensor]:
        """As the GEMMs made them; rounded ones come on top."""
        return [*call.args[:2], *(() if made.q is call.args[0] else made)]

    kept.watch(sparse_attention, "rotate_append_index", index_queries)
    kept.watch(sparse_attention, "top_k", lambda call, _: [call.kwargs["out"]])
    kept.watch(kernels.mla.sparse, "absorbed_queries", lambda _, made: [made])
    kept.watch(kernels.mla.sparse, "sparse_latent_attention", lambda _, made: [made])
    bench = Bench(folder, index_dtype=index_dtype)
    in_parts(bench)
    counted = sparse_workspace_bytes(bench.config, LENGTH, torch.float32, index_dtype)
    assert kept.most_bytes() == counted - choice_parts.CHOICE_BYTES
