"""DeepSeek V4 in the worker: bits depend neither on cuts nor on the batch, each kind of page counts, and nothing is
read that was not written.

That its logits are right is in tests/worker_service/test_model_parity.py. Pages are poisoned with NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernels import compressed_attention
from kernels.compress_tokens import compress_tokens
from kernels.compressed_attention.call import EntryPages
from kernels.key_rows import KeyRows
from tests.worker_service.kept_bytes import KeptBytes
from tests.worker_service.model_kit import NUM_PAGES, Bench, Part, make_reference, random_tokens
from worker_service.core.errors import ModelError
from worker_service.gpu.group_layout import PageRole
from worker_service.model import choice_parts
from worker_service.model import compressed_attention as compressed
from worker_service.model.attention_specs import RopeConfig, RopeKind
from worker_service.model.compressed_attention import compressed_workspace_bytes
from worker_service.model.config import read_model_spec
from worker_service.model.page_layouts import page_layouts
from worker_service.model.rope import cos_sin_table

PAGE = 128
LENGTH = 2 * PAGE + 70
PAGES = (5, 2, 9)
SPARSE_LAYER, HEAVY_LAYER = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek-v4")
    make_reference("deepseek-v4", folder)
    return folder


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    return Bench(folder)


def in_parts(folder: Path, *cuts: int) -> torch.Tensor:
    bench = Bench(folder)
    sequence = bench.sequence(random_tokens(LENGTH, 1), PAGES)
    return torch.cat([bench.all_logits(Part(sequence, *ends)) for ends in pairwise((0, *cuts, LENGTH))])


def test_bits_do_not_depend_on_the_cut(folder: Path) -> None:
    """R35: within a block and at its ends; the parts of one token are decode rows."""
    whole = in_parts(folder)
    assert whole.isfinite().all()
    for cuts in ((1, 2, 3, 4, 6), (PAGE - 1, PAGE, PAGE + 1), (130, 255, 256, 257, 258), (LENGTH - 2, LENGTH - 1)):
        assert torch.equal(in_parts(folder, *cuts), whole), cuts


def test_rows_are_chosen_a_few_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workspace holds changes no bit."""
    whole = in_parts(folder)
    monkeypatch.setattr(choice_parts, "LOGITS_BYTES", 4 * (LENGTH // 4) * 50)
    assert torch.equal(in_parts(folder), whole)


def test_the_workspace_is_that_of_logits_queries_choices_and_partial_results(folder: Path) -> None:
    spec = read_model_spec(folder)
    queries = 2000 * 16 * (16 * 2 + 4)
    wanted = (128 << 20) + 2 * (768 << 20) + queries + 4 * 2000 * 7
    assert compressed_workspace_bytes(spec, 2000, torch.bfloat16) == wanted
    windows = replace(spec, layers=spec.layers[:1])
    assert compressed_workspace_bytes(windows, 2000, torch.bfloat16) == 0


def test_a_launch_keeps_what_the_workspace_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside logits and partial results: what logits are made of, and the choices that are made of them."""
    kept = KeptBytes(monkeypatch)
    kept.watch(compressed, "index_logits", lambda call, _: call.args[:2])
    kept.watch(compressed, "top_k", lambda call, _: [call.kwargs["out"]])
    bench.all_logits(Part(bench.sequence(random_tokens(LENGTH, 1), PAGES), 0, LENGTH))
    counted = compressed_workspace_bytes(bench.config, LENGTH, torch.float32)
    assert kept.most_bytes() == counted - compressed.PARTIAL_BYTES - choice_parts.CHOICE_BYTES


def test_neighbours_change_nothing(folder: Path) -> None:
    """Case 50: a decode row that ends a block, a chunk behind a cached prefix and a fresh prompt."""
    lengths, starts = (2 * PAGE, PAGE + 90, 40), (2 * PAGE - 1, PAGE, 0)
    together, alone = Bench(folder), Bench(folder)

    def parts(bench: Bench) -> list[Part]:
        made = []
        for place, (length, start) in enumerate(zip(lengths, starts, strict=True)):
            sequence = bench.sequence(random_tokens(length, length), [2 * place + 1, 2 * place + 2])
            if start:
                bench.all_logits(Part(sequence, 0, start))
            made.append(Part(sequence, start, length))
        return made

    singles = torch.cat([alone.all_logits(part) for part in parts(alone)])
    assert torch.equal(together.all_logits(*parts(together), num_decode=1), singles)


def behind_a_hit(bench: Bench, first: list[int], table: tuple[int, ...] = PAGES) -> torch.Tensor:
    """Logits of a second sequence behind two pages of the first one; what it may not need is never written."""
    second = first[: 2 * PAGE] + random_tokens(70, 9)
    tables = []
    for spec in bench.pages.specs():
        holes = (2 * PAGE - spec.window_tokens + 1) // PAGE if spec.window_tokens else 0
        tables.append([NUM_PAGES] * holes + [*table[:2]][holes:] + [20])
    return bench.all_logits(Part(bench.sequence(second, *tables), 2 * PAGE, len(second)))


def test_a_hit_has_the_bits_of_a_cold_run(folder: Path, bench: Bench) -> None:
    """R38: of the prefix there are its entries, the last window and the last block's raw rows."""
    first = random_tokens(LENGTH, 2)
    bench.all_logits(Part(bench.sequence(first, PAGES), 0, LENGTH))
    second = first[: 2 * PAGE] + random_tokens(70, 9)
    cold = Bench(folder)
    wanted = cold.all_logits(Part(cold.sequence(second, PAGES), 0, len(second)))
    assert torch.equal(behind_a_hit(bench, first), wanted[2 * PAGE :])


WRONG: dict[str, Callable[[Bench], tuple[torch.Tensor, int]]] = {
    "entries of CSA": lambda bench: (bench.pages.layer_entries(SPARSE_LAYER).planes[0], 5),
    "index keys": lambda bench: (bench.pages.layer_entries(SPARSE_LAYER).planes[1], 5),
    "entries of HCA": lambda bench: (bench.pages.layer_entries(HEAVY_LAYER).planes[0], 5),
    "window": lambda bench: (bench.pages.layer_pages(0).planes[0], 2),
    "overlap": lambda bench: (bench.pages.layer_raw(SPARSE_LAYER).planes[0], 2),
    "overlap of index keys": lambda bench: (bench.pages.layer_raw(SPARSE_LAYER).planes[1], 2),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_page_of_another_prefix_changes_the_logits(bench: Bench, wrong: str) -> None:
    first, other = random_tokens(LENGTH, 3), random_tokens(LENGTH, 4)
    bench.all_logits(Part(bench.sequence(first, PAGES), 0, LENGTH))
    bench.all_logits(Part(bench.sequence(other, [11, 12, 13]), 0, LENGTH))
    sound = behind_a_hit(bench, first)
    plane, page = WRONG[wrong](bench)
    kept = plane[page].clone()
    plane[page] = plane[11 if page == PAGES[0] else 12]
    assert not torch.equal(behind_a_hit(bench, first), sound)
    plane[page] = kept
    assert torch.equal(behind_a_hit(bench, first), sound)


class RoundedUp(int):
    """A ratio by which tokens have an entry of a block that has begun."""

    def __rfloordiv__(self, count: int) -> int:
        return -(-count // int(self))


def test_an_entry_one_block_early_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public defect: each token of a chunk sees the entry of a block that ends behind it."""
    first = random_tokens(LENGTH, 5)
    bench.all_logits(Part(bench.sequence(first, PAGES), 0, LENGTH))
    sound = behind_a_hit(bench, first)

    def early(pages: torch.Tensor, tables: torch.Tensor, ratio: int, chosen: torch.Tensor | None) -> EntryPages:
        return EntryPages(pages, tables, RoundedUp(ratio) if ratio == PAGE else ratio, chosen)

    monkeypatch.setattr(compressed_attention, "EntryPages", early)
    assert not behind_a_hit(bench, first).isfinite().all(), "an entry that is not there was not read"
    monkeypatch.undo()
    assert torch.equal(behind_a_hit(bench, first), sound)


@pytest.mark.parametrize(
    ("position", "ratio", "seen"), [(127, 128, 1), (126, 128, 0), (3, 4, 1), (2, 4, 0), (255, 128, 2)]
)
def test_case_53_entries_are_seen_by_position(position: int, ratio: int, seen: int) -> None:
    rows = KeyRows(torch.zeros(1, dtype=torch.int32), torch.tensor([position + 1], dtype=torch.int32))
    assert rows.entries(ratio).num_keys.tolist() == [seen]


def entries_of(raw: torch.Tensor, ratio: int, overlap: bool, cuts: tuple[int, ...]) -> torch.Tensor:
    """All entries of one sequence, made in these parts, in poisoned pages."""
    length, dim = raw.shape[0], 16
    num_pages = length // PAGE
    raw_pages = torch.full((num_pages + 1, PAGE, raw.shape[1]), torch.nan)
    entries = torch.full((num_pages + 1, PAGE // ratio, dim), torch.nan)
    table = torch.arange(num_pages, 0, -1, dtype=torch.int32).unsqueeze(0)
    generator = torch.Generator().manual_seed(ratio)
    bias = torch.randn(ratio, raw.shape[1] // 2, generator=generator)
    cos_sin = cos_sin_table(RopeConfig(RopeKind.DEFAULT, 10000.0), 8, length)
    for first, end in pairwise((0, *cuts, length)):
        positions = torch.arange(first, end)
        compress_tokens(
            raw[first:end],
            raw_pages,
            table[0].long()[positions // PAGE] * PAGE + positions % PAGE,
            table,
            KeyRows(torch.zeros(end - first, dtype=torch.int32), (positions + 1).to(torch.int32)),
            entries,
            table,
            ratio=ratio,
            overlap=overlap,
            bias=bias,
            norm=torch.ones(dim),
            eps=1e-6,
            cos_sin=cos_sin,
        )
    return entries[table[0].long()].flatten(0, 1)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
def test_case_52_entries_do_not_depend_on_the_cut(ratio: int, overlap: bool) -> None:
    raw = torch.randn(1024, 64 if overlap else 32, generator=torch.Generator().manual_seed(1))
    whole = entries_of(raw, ratio, overlap, ())
    assert whole.isfinite().all() and whole.shape[0] == 1024 // ratio
    for cuts in ((512,), (512, 768, 896), (1, 511, 514)):
        assert torch.equal(entries_of(raw, ratio, overlap, cuts), whole), cuts


def test_what_pages_hold(folder: Path) -> None:
    spec = read_model_spec(folder)
    layouts = page_layouts(spec, torch.float32, PAGE)
    assert [(layout.name, layout.role) for layout in layouts] == [
        ("entries4", PageRole.ENTRIES),
        ("entries128", PageRole.ENTRIES),
        ("window1", PageRole.RAW),
        ("window8", PageRole.RAW),
        ("window128", PageRole.KEYS),
    ]
    with pytest.raises(ModelError, match="page_tokens: 64 is no multiple of 128"):
        page_layouts(spec, torch.float32, 64)
