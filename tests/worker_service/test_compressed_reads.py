"""DeepSeek V4 in the runner: which rows of pages a launch reads behind a cached prefix, shown with poison.

What a launch may not need is NaN: a logit that is finite has not read it. Every row stands where
tests/worker_service/test_compressed_attention.py has it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.worker_service.model_kit import MODELS, Bench, Part, make_reference, random_tokens

PAGE, WINDOW = 128, 128
SPARSE_LAYER, HEAVY_LAYER = 1, 2
PREFIX = 2 * PAGE
LENGTH = PREFIX + 100
TABLE = (5, 2, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose queries choose all compressed entries that they see."""
    folder = tmp_path_factory.mktemp("deepseek-v4-all")
    family, fields = MODELS["deepseek-v4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "deepseek-v4-all", (family, {**fields, "index_topk": 300}))
        make_reference("deepseek-v4-all", folder)
    return folder


class Stage:
    """A bench with a prompt, all of which is computed once; planes of its pages by what they hold."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.sequence = self.bench.sequence(random_tokens(LENGTH, 1), TABLE)
        self.whole = self.logits(0, LENGTH)
        pages = self.bench.pages
        self.entries = {4: pages.layer_entries(SPARSE_LAYER).planes, 128: pages.layer_entries(HEAVY_LAYER).planes}
        self.raw = {4: pages.layer_raw(SPARSE_LAYER).planes, 128: pages.layer_raw(HEAVY_LAYER).planes}
        self.windows = [pages.layer_pages(layer).planes[0] for layer in range(3)]
        self._planes = [plane for layer in range(3) for plane in pages.planes(layer)]
        self._computed = [plane.clone() for plane in self._planes]

    def restore(self) -> None:
        """Undoes what a test did to the pages."""
        for plane, computed in zip(self._planes, self._computed, strict=True):
            plane.copy_(computed)

    def logits(self, first: int, end: int, num_decode: int | None = None) -> torch.Tensor:
        return self.bench.all_logits(Part(self.sequence, first, end), num_decode=num_decode)

    def poison(self, plane: torch.Tensor, first: int, end: int) -> None:
        """Rows first .. end - 1 of the sequence, in the plane's own rows."""
        of_page = plane.shape[1]
        for row in range(first, end):
            plane[TABLE[row // of_page], row % of_page] = torch.nan


@pytest.fixture(scope="module")
def computed(folder: Path) -> Stage:
    return Stage(folder)


@pytest.fixture
def stage(computed: Stage) -> Stage:
    computed.restore()
    return computed


@pytest.mark.parametrize(("first", "end"), [(256, 260), (256, 257), (257, 300), (300, 356)])
def test_case_49_a_chunk_reads_its_window_and_the_entries_before_it(stage: Stage, first: int, end: int) -> None:
    """Of the prefix: the last 127 tokens of each window, entries that end in it, raw rows of its last block."""
    unfinished = {ratio: first // ratio * ratio for ratio in (4, 128)}
    for plane in stage.windows:
        stage.poison(plane, 0, first - WINDOW + 1)
        stage.poison(plane, first, LENGTH)
    for ratio, planes in stage.entries.items():
        for plane in planes:
            stage.poison(plane, first // ratio, LENGTH // ratio)
    for ratio, planes in stage.raw.items():
        for plane in planes:
            stage.poison(plane, 0, unfinished[ratio] - (4 if ratio == 4 else 0))
            stage.poison(plane, first, LENGTH)
    assert torch.equal(stage.logits(first, end), stage.whole[first:end])


def test_case_49_the_first_row_of_a_window_is_read_by_its_token_and_not_by_the_next(stage: Stage) -> None:
    for plane in stage.windows:
        stage.poison(plane, PREFIX - WINDOW + 1, PREFIX - WINDOW + 2)
    assert torch.equal(stage.logits(PREFIX + 1, PREFIX + 4), stage.whole[PREFIX + 1 : PREFIX + 4])
    assert not stage.logits(PREFIX, PREFIX + 1).isfinite().any()


def test_case_49_a_fresh_prompt_beside_it_reads_nothing_of_it(stage: Stage) -> None:
    """Positions 0 to 4 of a prompt in pages that nobody wrote."""
    tokens = random_tokens(5, 7)
    alone = stage.bench.all_logits(Part(stage.bench.sequence(tokens, [11]), 0, 5))
    both = stage.bench.all_logits(
        Part(stage.bench.sequence(tokens, [12]), 0, 5), Part(stage.sequence, PREFIX, PREFIX + 4)
    )
    assert alone.isfinite().all()
    assert torch.equal(both, torch.cat([alone, stage.whole[PREFIX : PREFIX + 4]]))


@pytest.mark.parametrize("num_decode", [0, 1])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("position", [130, 131, 132, 254, 255, 256, 259])
def test_case_53_a_token_sees_the_entries_of_blocks_that_ended(
    stage: Stage, position: int, ratio: int, num_decode: int
) -> None:
    """As a decode row and as a prompt's; the entry of its own block is made before it is read."""
    seen = (position + 1) // ratio
    for plane in stage.entries[ratio]:
        stage.poison(plane, seen, LENGTH // ratio)
    assert torch.equal(stage.logits(position, position + 1, num_decode), stage.whole[position : position + 1])
    last_of_before = position // ratio - 1
    stage.poison(stage.entries[ratio][0], last_of_before, last_of_before + 1)
    assert not stage.logits(position, position + 1, num_decode).isfinite().any()


@pytest.mark.parametrize("end", [131, 132, 254, 255, 256, 257, LENGTH])
def test_case_53_the_end_of_the_chunk_changes_no_row(stage: Stage, end: int) -> None:
    """Entries behind the prefix are made anew: those of a chunk's end are poison for its first tokens."""
    for ratio, planes in stage.entries.items():
        for plane in planes:
            stage.poison(plane, PAGE // ratio, LENGTH // ratio)
    assert torch.equal(stage.logits(PAGE, end), stage.whole[PAGE:end])


@pytest.mark.parametrize("cuts", [(512,), (512, 768, 896), (1, 511, 514)])
def test_case_52_pages_of_entries_do_not_depend_on_the_cut(folder: Path, cuts: tuple[int, ...]) -> None:
    """A prompt of 1,024 tokens: its entries and index keys, and its raw rows, have the same bits."""
    length, held = 1024, []
    for ends in ((), cuts):
        bench = Bench(folder)
        sequence = bench.sequence(random_tokens(length, 3), range(1, length // PAGE + 1))
        for first, end in pairwise((0, *ends, length)):
            bench.run(Part(sequence, first, end))
        pages = [bench.pages.layer_entries(layer) for layer in (SPARSE_LAYER, HEAVY_LAYER)]
        raw = [bench.pages.layer_raw(layer) for layer in (SPARSE_LAYER, HEAVY_LAYER)]
        held.append([plane[1 : length // PAGE + 1].clone() for rows in (*pages, *raw) for plane in rows.planes])
    whole, cut = held
    assert len(whole) == 6 and all(plane.isfinite().all() for plane in whole)
    assert all(map(torch.equal, whole, cut))
