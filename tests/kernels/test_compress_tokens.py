"""compress_tokens: entries by their definition, in poisoned pages, for every cut of a prompt and in any batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from kernels.compress_tokens import compress_tokens
from kernels.errors import KernelArgumentError
from kernels.key_rows import KeyRows
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import rarely_interpreted
from tests.kernels.inputs import POISON, far_pages
from tests.kernels.target import Target

EPS, PAGE, PADDING = 1e-6, 16, KeyRows(*torch.tensor([[-1], [0]], dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class Sequences:
    """Raw rows of whole sequences, and pages of which they hold some; nothing is in them yet."""

    raw: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    raw_pages: torch.Tensor
    entry_tables: torch.Tensor
    entry_pages: torch.Tensor
    ratio: int
    overlap: bool
    bias: torch.Tensor
    norm: torch.Tensor
    cos_sin: torch.Tensor

    @property
    def dim(self) -> int:
        return self.norm.shape[0]

    def blank(self) -> Sequences:
        pages = (torch.full_like(pages, POISON) for pages in (self.raw_pages, self.entry_pages))
        return replace(self, **dict(zip(("raw_pages", "entry_pages"), pages, strict=True)))

    def launch(self, target: Target, *parts: tuple[int, int, int]) -> None:
        """Rows `first` to `end` of these sequences, and one of padding behind them."""
        device = self.raw_pages.device
        raw, slots, rows = [], [], []
        for sequence, first, end in parts:
            positions = torch.arange(first, end, device=device)
            pages = self.tables[sequence].long()[positions // PAGE]
            raw.append(self.raw[sequence][first:end])
            slots.append(pages * PAGE + positions % PAGE)
            rows.append(torch.stack((torch.full_like(positions, sequence), positions + 1)).int())
        raw.append(torch.full_like(self.raw[0][:1], POISON))
        slots.append(torch.full((1,), -1, device=device))
        rows.append(torch.stack(PADDING).to(device))
        # A slice of wider rows, as a GEMM of several parts makes it.
        wide = torch.nn.functional.pad(torch.cat(raw), (8, 8))
        compress_tokens(
            wide[:, 8:-8], self.raw_pages, torch.cat(slots), self.tables, KeyRows(*torch.cat(rows, dim=1).contiguous()),
            self.entry_pages, self.entry_tables, ratio=self.ratio, overlap=self.overlap, bias=self.bias,
            norm=self.norm, eps=EPS, cos_sin=self.cos_sin, backend=target.backend,
        )  # fmt: skip

    def entries(self, sequence: int) -> torch.Tensor:
        """What pages hold of a sequence's whole blocks."""
        return self.entry_pages[self.entry_tables[sequence].long()].flatten(0, 1)[: self.num_entries(sequence)]

    def num_entries(self, sequence: int) -> int:
        return self.raw[sequence].shape[0] // self.ratio

    def truth(self, sequence: int, entry: int) -> torch.Tensor:
        """An entry by its definition, in fp64."""
        values, gates = self.raw[sequence].double().chunk(2, dim=1)
        own = slice(entry * self.ratio, (entry + 1) * self.ratio)
        gates = gates + self.bias.double().repeat(gates.shape[0] // self.ratio + 1, 1)[: gates.shape[0]]
        if self.overlap:
            before = slice(max(entry - 1, 0) * self.ratio, entry * self.ratio)
            parts = [torch.cat((rows[before, : self.dim], rows[own, self.dim :])) for rows in (values, gates)]
        else:
            parts = [rows[own] for rows in (values, gates)]
        made = (parts[0] * parts[1].softmax(dim=0)).sum(dim=0)
        made = made / (made.square().mean() + EPS).sqrt() * self.norm.double()
        half = self.cos_sin.shape[2]
        cos, sin = self.cos_sin[entry * self.ratio].double()
        even, odd = made[-2 * half :: 2].clone(), made[1 - 2 * half :: 2].clone()
        made[-2 * half :: 2], made[1 - 2 * half :: 2] = even * cos - odd * sin, odd * cos + even * sin
        return made


def make(
    target: Target, ratio: int, overlap: bool, lengths: tuple[int, ...], dim: int = 24, dtype: torch.dtype | None = None
) -> Sequences:
    dtype, half = dtype or torch.bfloat16, 4
    rng = torch.Generator().manual_seed(ratio)
    width = (4 if overlap else 2) * dim
    counts = [-(-length // PAGE) for length in lengths]
    order = (torch.randperm(sum(counts), generator=rng) + 1).int()
    tables, taken = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32), 0
    for sequence, count in enumerate(counts):
        tables[sequence, :count] = order[taken : taken + count]
        taken += count
    angles = torch.rand(max(lengths), half, generator=rng) * 6.3
    made = Sequences(
        tuple(torch.randn(length, width, generator=rng).to(dtype) for length in lengths),
        tables,
        torch.full((sum(counts) + 2, PAGE, width), POISON, dtype=dtype),
        torch.where(tables > 0, sum(counts) + 1 - tables, 0),
        torch.full((sum(counts) + 2, max(PAGE // ratio, 1), dim), POISON, dtype=dtype),
        ratio,
        overlap,
        torch.randn(ratio, width // 2, generator=rng),
        (torch.rand(dim, generator=rng) + 0.5).to(dtype),
        torch.stack((angles.cos(), angles.sin()), dim=1),
    )
    on_device = {name: getattr(made, name).to(target.device) for name in ("tables", "raw_pages", "entry_tables")}
    on_device |= {name: getattr(made, name).to(target.device) for name in ("entry_pages", "bias", "norm", "cos_sin")}
    return replace(made, raw=tuple(raw.to(target.device) for raw in made.raw), **on_device)


KINDS = pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False), rarely_interpreted(8, True), (2, False)])
LENGTHS = (37, 3, 64)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_entries_are_weighted_sums_normed_and_turned(
    target: Target, ratio: int, overlap: bool, dtype: torch.dtype
) -> None:
    made = make(target, ratio, overlap, LENGTHS, dtype=dtype)
    made.launch(target, *((sequence, 0, length) for sequence, length in enumerate(LENGTHS)))
    tolerance = 4e-2 if dtype is torch.bfloat16 else 1e-5
    for sequence, length in enumerate(LENGTHS):
        got = made.entries(sequence)
        wanted = [made.truth(sequence, entry) for entry in range(length // ratio)]
        if wanted:
            torch.testing.assert_close(got.double(), torch.stack(wanted), rtol=0.0, atol=tolerance)
        places = torch.arange(length, device=got.device)
        held = made.raw_pages[made.tables[sequence].long()[places // PAGE], places % PAGE]
        assert_same_bits(held, made.raw[sequence])
    assert made.raw_pages.isfinite().all(-1).sum() == sum(LENGTHS)
    assert made.entry_pages.isfinite().all(-1).sum() == sum(length // ratio for length in LENGTHS)


@KINDS
def test_entries_do_not_depend_on_the_cut_nor_on_mates(target: Target, ratio: int, overlap: bool) -> None:
    whole = make(target, ratio, overlap, LENGTHS)
    whole.launch(target, *((sequence, 0, length) for sequence, length in enumerate(LENGTHS)))
    for cuts in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (16, 32), (15, 17, 31)):
        parted = whole.blank()
        for sequence, length in enumerate(LENGTHS):
            ends = (0, *(cut for cut in cuts if cut < length), length)
            for first, end in pairwise(ends):
                parted.launch(target, (sequence, first, end))
        assert_same_bits(parted.entry_pages, whole.entry_pages)
        assert_same_bits(parted.raw_pages, whole.raw_pages)


def test_decode_rows_and_prompts_in_one_launch(target: Target) -> None:
    """Sequences side by side of which one is behind what pages hold, one ends a block by its only token."""
    whole = make(target, 4, True, LENGTHS)
    whole.launch(target, *((sequence, 0, length) for sequence, length in enumerate(LENGTHS)))
    parted = whole.blank()
    parted.launch(target, (0, 0, 35), (2, 0, 19))
    parted.launch(target, (0, 35, 36), (2, 19, 61), (1, 0, 3))
    parted.launch(target, (2, 61, 64), (0, 36, 37))
    assert_same_bits(parted.entry_pages, whole.entry_pages)


def test_raw_rows_of_other_blocks_are_not_read(target: Target) -> None:
    """A block of an entry, and with overlap the one before: all else in pages is NaN."""
    for overlap in (True, False):
        whole = make(target, 4, overlap, (64,))
        whole.launch(target, (0, 0, 64))
        behind = whole.blank()
        behind.launch(target, (0, 24 if overlap else 28, 31))
        behind.launch(target, (0, 31, 32))
        assert_same_bits(behind.entries(0)[7], whole.entries(0)[7])


@pytest.mark.parametrize("plane", ["raw_pages", "entry_pages"])
def test_a_pool_beyond_two_billion_elements(target: Target, plane: str) -> None:
    """The second launch reads raw rows that the first one wrote."""
    near = make(target, 4, True, LENGTHS)
    far = replace(near.blank(), **{plane: far_pages(getattr(near, plane))})
    for made in (near, far):
        made.launch(target, *((sequence, 0, min(length, 34)) for sequence, length in enumerate(LENGTHS)))
        made.launch(target, (0, 34, 37), (2, 34, 64))
    assert_same_bits(far.raw_pages, near.raw_pages)
    assert_same_bits(far.entry_pages, near.entry_pages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"raw": torch.zeros(2, 63)}, "raw: shape"),
        ({"raw": torch.zeros(2, 64, dtype=torch.bfloat16)}, "raw: dtype"),
        ({"raw_pages": torch.zeros(9, 16, 32)}, "raw_pages: shape"),
        ({"raw_slots": torch.zeros(2, dtype=torch.int32)}, "raw_slots: dtype"),
        ({"entry_pages": torch.zeros(9, 16)}, "entry_pages: shape"),
        ({"entry_tables": torch.zeros(2, 4, dtype=torch.int32)}, "block_tables: shape"),
        ({"ratio": 0}, "ratio: must be positive"),
        ({"overlap": False}, "raw: shape"),
        ({"bias": torch.zeros(4, 16)}, "bias: shape"),
        ({"norm": torch.zeros(8)}, "norm: shape"),
        ({"cos_sin": torch.zeros(8, 2, 9)}, "cos_sin: must turn 2 to 16 elements"),
        ({"rows": KeyRows(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))}, "rows.sequences"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "raw": torch.zeros(2, 64),
        "raw_pages": torch.zeros(9, 16, 64),
        "raw_slots": torch.zeros(2, dtype=torch.int64),
        "raw_tables": torch.zeros(3, 4, dtype=torch.int32),
        "rows": KeyRows(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        "entry_pages": torch.zeros(9, 4, 16),
        "entry_tables": torch.zeros(3, 4, dtype=torch.int32),
        "ratio": 4,
        "overlap": True,
        "bias": torch.zeros(4, 32),
        "norm": torch.zeros(16),
        "eps": 1e-6,
        "cos_sin": torch.zeros(64, 2, 4),
    }
    with pytest.raises(KernelArgumentError, match=message):
        compress_tokens(**{**arguments, **change})
