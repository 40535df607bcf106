"""The plan of a scan in two launches: one program counts the rows' blocks, then others find each block's tokens.

Counts are sums of integers; no program of the second launch needs what another one writes.
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import search_levels
from kernels.addressing.triton import sequence_of
from kernels.block_scan.plan import GRID_TOKENS, ScanPlan
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Rows of one step, and blocks and snapshots of one program, which looks at 64 rows for each.
CHUNK = 128
PLACED = 32

_GRID = tl.constexpr(GRID_TOKENS)


@triton.jit
def row_span(row, ok, cu_q_ptr, cu_k_ptr):
    """Returns of each row its first token, how many it has, and how far behind a multiple of the grid it begins."""
    begin = tl.load(cu_q_ptr + row, mask=ok, other=0)
    length = tl.load(cu_q_ptr + row + 1, mask=ok, other=0) - begin
    keys = tl.load(cu_k_ptr + row + 1, mask=ok, other=0) - tl.load(cu_k_ptr + row, mask=ok, other=0)
    return begin, length, (keys - length) % _GRID


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows"])
def count_blocks(cu_q_ptr, cu_k_ptr, working_ptr, cu_blocks_ptr, num_rows, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr):
    allow_next_launch_and_wait(OVERLAPS)
    total = 0
    for first in range(0, num_rows, CHUNK):
        row = first + tl.arange(0, CHUNK)
        ok = row < num_rows
        _, length, offset = row_span(row, ok, cu_q_ptr, cu_k_ptr)
        is_real = tl.load(working_ptr + row, mask=ok, other=0) > 0
        count = tl.where(is_real & (length > 0), (offset + length + _GRID - 1) // _GRID, 0)
        tl.store(cu_blocks_ptr + row + 1, total + tl.cumsum(count, 0), mask=ok)
        total += tl.sum(count, 0)
    tl.store(cu_blocks_ptr, 0)


@triton.jit(do_not_specialize=["num_rows", "num_leaves"])
def place_blocks(
    cu_q_ptr, cu_k_ptr, cu_blocks_ptr, blocks_ptr, leave_slot_ptr, row_ptr, tokens_ptr, slot_ptr, num_rows, num_leaves,
    max_blocks, LEVELS: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """CHUNK blocks, and CHUNK snapshots: each finds the block that ends where it lies."""
    allow_next_launch_and_wait(OVERLAPS)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_block = (at < max_blocks) & (at < tl.load(cu_blocks_ptr + num_rows))
    row, before = sequence_of(at, cu_blocks_ptr, num_rows, LEVELS)
    begin, length, offset = row_span(row, is_block, cu_q_ptr, cu_k_ptr)
    first = tl.maximum((at - before) * _GRID - offset, 0)
    end = tl.minimum((at - before + 1) * _GRID - offset, length)
    tl.store(blocks_ptr + at * 2, begin + first, mask=is_block)
    tl.store(blocks_ptr + at * 2 + 1, end - first, mask=is_block)

    ok = at < num_leaves
    slot = tl.load(slot_ptr + at, mask=ok, other=0)
    ok = ok & (slot > 0)
    row = tl.load(row_ptr + at, mask=ok, other=0)
    tokens = tl.load(tokens_ptr + at, mask=ok, other=0)
    begin, length, offset = row_span(row, ok, cu_q_ptr, cu_k_ptr)
    block = tl.load(cu_blocks_ptr + row, mask=ok, other=0) + (offset + tokens - 1) // _GRID
    ok = ok & (tokens > 0) & (((offset + tokens) % _GRID == 0) | (tokens == length))
    ok = ok & (block < tl.load(cu_blocks_ptr + row + 1, mask=ok, other=0))
    tl.store(leave_slot_ptr + block, slot, mask=ok)


def launch(cu_seqlens_k: torch.Tensor, plan: ScanPlan) -> None:
    """Fills the plan, whose leave_slot is zeros; checked, non-empty arguments."""
    slots, lengths = plan.slots, (plan.cu_seqlens_q, cu_seqlens_k)
    options = {"num_warps": 4, **overlap_options(plan.blocks.device)}
    with torch.cuda.device_of(plan.blocks):
        count_blocks[(1,)](*lengths, slots.working, plan.cu_blocks, plan.num_rows, CHUNK=CHUNK, **options)
        place_blocks[(triton.cdiv(max(plan.max_blocks, slots.num_leaves), PLACED),)](
            *lengths, plan.cu_blocks, plan.blocks, plan.leave_slot,
            slots.leave_row, slots.leave_tokens, slots.leave_slot, plan.num_rows, slots.num_leaves, plan.max_blocks,
            LEVELS=search_levels(plan.num_rows), CHUNK=PLACED, **options,
        )  # fmt: skip
