"""Launches top_k's Gluon kernels: programs that take rows, or spans of few rows and then a choice."""

from typing import NamedTuple

import torch
import triton

from kernels.device import num_multiprocessors
from kernels.top_k.hopper import held_of
from kernels.top_k.hopper.kernel import choose_kept, choose_rows, keep_spans
from kernels.top_k.triton import SAFETY, SAMPLE


class Tile(NamedTuple):
    """Warps of a program and slots of 32 logits that each of them takes at once."""

    slots: int
    warps: int

    @property
    def logits(self) -> int:
        return self.slots * 32 * self.warps


class RowTile(NamedTuple):
    """Of programs that take rows: their tile, registers of a thread, how many a multiprocessor has room for."""

    tile: Tile
    registers: int
    resident: int


# 2,048 rows of 65,536 logits take 372 us with the first and 334 with the second, of 16,384 logits 164 and 172 (H200).
NARROW_ROWS, WIDE_ROWS, WIDTH = RowTile(Tile(8, 4), 128, 4), RowTile(Tile(16, 8), 80, 3), 32768
# Of programs that take spans, and of those that choose among what these kept.
SPAN_TILE, CHOICE_TILE = Tile(32, 8), Tile(8, 16)
# Numbers of spans up to this one share a compilation.
LEAST_SPANS = 64


def launch(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out; arguments that `reason_against` has nothing against."""
    programs = num_multiprocessors(logits.device)
    with torch.cuda.device_of(logits):
        if 2 * logits.shape[0] > programs:
            launch_rows(logits, num_keys, out, programs)
        else:
            launch_spans(logits, num_keys, out, programs)


def launch_rows(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor, multiprocessors: int) -> None:
    (rows, width), k = logits.shape, out.shape[1]
    tile, registers, resident = WIDE_ROWS if width >= WIDTH else NARROW_ROWS
    programs = min(rows, resident * multiprocessors)
    counts = torch.empty(programs * tile.warps, dtype=torch.int32, device=out.device)
    kept = torch.empty(programs, width, dtype=torch.int64, device=out.device)
    choose_rows[(programs,)](
        logits, num_keys, counts, kept, out, logits.stride(0), width, rows,
        K=k, BLOCK_K=triton.next_power_of_2(k), SAFETY=SAFETY, SAMPLE=SAMPLE, HELD=held_of(k),
        SLOTS=tile.slots, WARPS=tile.warps, num_warps=tile.warps, maxnreg=registers,
    )  # fmt: skip


def launch_spans(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor, programs: int) -> None:
    (rows, width), k, stride = logits.shape, out.shape[1], logits.stride(0)
    spans, size = spans_of(rows, width, programs)
    bounds, counts = (torch.empty(n, dtype=torch.int32, device=out.device) for n in (rows, rows * spans))
    kept = torch.empty(rows, width, dtype=torch.int64, device=out.device)
    keep_spans[(spans, rows)](
        logits, num_keys, bounds, counts, kept, stride, width, size,
        K=k, SAFETY=SAFETY, SAMPLE=SAMPLE, HELD=held_of(k), SLOTS=SPAN_TILE.slots, WARPS=SPAN_TILE.warps,
        num_warps=SPAN_TILE.warps,
    )  # fmt: skip
    choose_kept[(rows,)](
        logits, num_keys, bounds, counts, kept, out, stride, width, spans, size,
        K=k, BLOCK_K=triton.next_power_of_2(k), SPANS=max(triton.next_power_of_2(spans), LEAST_SPANS),
        HELD=held_of(k), SLOTS=CHOICE_TILE.slots, WARPS=CHOICE_TILE.warps, num_warps=CHOICE_TILE.warps,
        launch_pdl=True,
    )  # fmt: skip


def spans_of(rows: int, width: int, programs: int) -> tuple[int, int]:
    """Returns how many spans a row has and how long they are: whole tiles, no more spans than there are programs."""
    tiles = triton.cdiv(width, SPAN_TILE.logits)
    size = triton.cdiv(tiles, max(programs // rows, 1)) * SPAN_TILE.logits
    return triton.cdiv(width, size), size
