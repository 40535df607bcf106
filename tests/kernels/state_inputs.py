"""Rows that begin, restore, continue and leave recurrent states, in pools where every slot that nobody reads is NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from kernels.state_slots import StateSlots

POISON = float("nan")
SPARE_SLOTS = 3


class Begin(Enum):
    """Where a row's state comes from."""

    FRESH = "zeros"
    RESTORE = "a snapshot"
    WORKING = "its working slot"
    PADDING = "a row of nobody"


class StateRow(NamedTuple):
    """One row of a launch."""

    tokens: int
    begin: Begin = Begin.FRESH
    leave: tuple[int, ...] = ()
    rolling: bool = False


# Each kind of row, decode rows among prompts, an empty one of each kind, snapshots at the first and the last token.
MIXED = (
    StateRow(1, Begin.WORKING, rolling=True),
    StateRow(1, Begin.FRESH),
    StateRow(0, Begin.RESTORE),
    StateRow(37, Begin.FRESH, leave=(1, 16, 37)),
    StateRow(2, Begin.RESTORE, leave=(2,), rolling=True),
    StateRow(1, Begin.PADDING),
    StateRow(3, Begin.WORKING, leave=(1, 3)),
    StateRow(0, Begin.FRESH),
    StateRow(90, Begin.RESTORE, leave=(64,)),
    StateRow(8, Begin.WORKING),
    StateRow(0, Begin.WORKING, rolling=True),
    StateRow(5, Begin.PADDING),
)


# The same for scans, with the position at which each row begins: snapshots lie on the grid of 64 or at a row's end.
SCANNED = (
    (0, StateRow(1)),
    (64, StateRow(64, Begin.RESTORE, leave=(64,))),
    (63, StateRow(2, Begin.WORKING, leave=(1,), rolling=True)),
    (10, StateRow(0, Begin.WORKING, rolling=True)),
    (100, StateRow(250, Begin.WORKING, leave=(28, 156, 250))),
    (7, StateRow(70, Begin.PADDING, leave=(57,))),
    (0, StateRow(130, leave=(64, 128, 130))),
    (128, StateRow(5, Begin.RESTORE)),
    (0, StateRow(0)),
)


def make_slots(rows: Sequence[StateRow], *, seed: int = 0, padding: int = 2) -> tuple[StateSlots, int]:
    """Returns slots drawn at random, on the CPU, and how many slots a pool for them has.

    `padding` snapshot entries name no slot. A row that does not restore, is not fresh or leaves nothing there names 0,
    or -1, or for a fresh one what it must not read.
    """
    count = sum(3 + len(row.leave) for row in rows) + SPARE_SLOTS
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1
    numbers: Iterator[int] = iter(order.tolist())
    left = [(index, tokens, next(numbers)) for index, row in enumerate(rows) for tokens in row.leave]
    left += [(0, 0, -entry % 2 - 1) for entry in range(padding)]
    columns = (
        [0 if row.begin is Begin.PADDING else next(numbers) for row in rows],
        [next(numbers) if row.begin in (Begin.RESTORE, Begin.FRESH, Begin.PADDING) else 0 for row in rows],
        [int(row.begin is Begin.FRESH) for row in rows],
        [next(numbers) if row.rolling else -1 for row in rows],
        *([entry[field] for entry in left] for field in range(3)),
    )
    return StateSlots(*(torch.tensor(column, dtype=torch.int32) for column in columns)), count + 1


def sources(slots: StateSlots, rows: Sequence[StateRow]) -> list[int]:
    """Returns the slot that each row begins from, by its kind; 0: none."""
    of_kind = {Begin.RESTORE: slots.restore, Begin.WORKING: slots.working}
    return [int(of_kind[row.begin][i]) if row.begin in of_kind else 0 for i, row in enumerate(rows)]


def make_pool(
    slots: StateSlots, rows: Sequence[StateRow], count: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 1
) -> torch.Tensor:
    """Returns [count, *shape]: random states where rows begin, NaN everywhere else."""
    pool = torch.full((count, *shape), POISON, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for slot in sources(slots, rows):
        if slot:
            pool[slot] = torch.randn(tuple(shape), generator=generator).to(dtype)
    return pool


def begins(rows: Iterable[StateRow]) -> torch.Tensor:
    """Returns cu_seqlens_q."""
    lengths = torch.tensor([0, *(row.tokens for row in rows)], dtype=torch.int32)
    return lengths.cumsum(0).int()


def placed(slots: StateSlots, device: str) -> StateSlots:
    return StateSlots(*(array.to(device) for array in slots))


def keys(first: Sequence[int], rows: Sequence[StateRow]) -> torch.Tensor:
    """Returns cu_seqlens_k of rows that begin at those positions."""
    lengths = [0, *(position + row.tokens for position, row in zip(first, rows, strict=True))]
    return torch.tensor(lengths, dtype=torch.int32).cumsum(0).int()
