"""Plans of scans: blocks at multiples of the grid, none for padding, a slot behind the block where a state is left."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from kernels.block_scan import GRID_TOKENS, max_blocks, plan_scan
from kernels.errors import KernelArgumentError
from tests.kernels.state_inputs import SCANNED, Begin, StateRow, begins, keys, make_slots, placed
from tests.kernels.target import Target


def blocks_by_hand(first: list[int], rows: list[StateRow]) -> list[tuple[int, int, int]]:
    """Returns row, first token of the row and number of tokens, token by token."""
    blocks: list[tuple[int, int, int]] = []
    for index, (position, row) in enumerate(zip(first, rows, strict=True)):
        for token in range(row.tokens if row.begin is not Begin.PADDING else 0):
            if token == 0 or (position + token) % GRID_TOKENS == 0:
                blocks.append((index, token, 0))
            blocks[-1] = (index, blocks[-1][1], blocks[-1][2] + 1)
    return blocks


@pytest.mark.parametrize("repeats", [1, 20])
def test_blocks_and_snapshots(target: Target, repeats: int) -> None:
    first, rows = [position for position, _ in SCANNED] * repeats, [row for _, row in SCANNED] * repeats
    slots, _ = make_slots(rows)
    cu, num_tokens = begins(rows), sum(row.tokens for row in rows)
    plan = plan_scan(
        cu.to(target.device), keys(first, rows).to(target.device), placed(slots, target.device), num_tokens + 5,
        backend=target.backend,
    )  # fmt: skip
    wanted = blocks_by_hand(first, rows)
    count = int(plan.cu_blocks[-1])
    assert count == len(wanted) <= max_blocks(num_tokens, len(rows)) <= plan.max_blocks
    assert plan.cu_blocks.diff().tolist() == [sum(row == index for row, _, _ in wanted) for index in range(len(rows))]
    assert plan.blocks[:count].tolist() == [[int(cu[row]) + token, size] for row, token, size in wanted]
    ends = {(row, token + size): block for block, (row, token, size) in enumerate(wanted)}
    left = [0] * plan.max_blocks
    for row, tokens, slot in zip(*(array.tolist() for array in slots[-3:]), strict=True):
        if slot > 0 and rows[row].begin is not Begin.PADDING:
            left[ends[row, tokens]] = slot
    assert plan.leave_slot.tolist() == left


def test_no_rows(target: Target) -> None:
    slots, _ = make_slots([], padding=0)
    cu = torch.zeros(1, dtype=torch.int32, device=target.device)
    plan = plan_scan(cu, cu, placed(slots, target.device), 100, backend=target.backend)
    assert plan.cu_blocks.tolist() == [0] and not plan.leave_slot.any()


def test_the_bound_holds_and_is_reached() -> None:
    for tokens in range(300):
        for offset in range(GRID_TOKENS):
            assert len(blocks_by_hand([offset], [StateRow(tokens)])) <= max_blocks(tokens, 1)
    assert len(blocks_by_hand([63] * 5, [StateRow(66)] * 5)) == max_blocks(330, 5) == 15


@pytest.mark.parametrize("tokens", [0, 20, 65])
def test_a_snapshot_off_the_grid(target: Target, tokens: int) -> None:
    """A GPU has no say in what a slot is asked for: nothing is written. A CPU says what is wrong."""
    slots, _ = make_slots([StateRow(90, leave=(tokens,))])
    cu = torch.tensor([0, 90], dtype=torch.int32, device=target.device)
    given = (cu, cu, placed(slots, target.device), 90)
    if target.backend is Backend.REFERENCE:
        with pytest.raises(KernelArgumentError, match=f"slots.leave_tokens: {tokens} of row 0 end no block of 64"):
            plan_scan(*given, backend=target.backend)
    else:
        assert not plan_scan(*given, backend=target.backend).leave_slot.any()


def test_wrong_arguments_are_named() -> None:
    slots, _ = make_slots([StateRow(3)])
    cu = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="cu_seqlens_k: dtype must be one of"):
        plan_scan(cu, cu.long(), slots, 3)
    with pytest.raises(KernelArgumentError, match=r"slots.working: shape must be \[2\], got \[1\]"):
        plan_scan(cu.repeat(2)[:3].contiguous(), cu.repeat(2)[:3].contiguous(), slots, 3)
    with pytest.raises(KernelArgumentError, match="num_tokens: must not be negative, got -1"):
        plan_scan(cu, cu, slots, -1)
