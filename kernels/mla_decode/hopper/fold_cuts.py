"""Folds the partial results of a launch that was cut by load: no order among them, so that many are read at once.

A unit is a tile of rows of one sequence. Its partial results are folded by blocks of 16 rows and some columns, so many
that all units together have about as many blocks as the launch has programs: the fewer units, the narrower the blocks,
and the more parts of one are read at a time.
"""

import torch
import triton
import triton.language as tl

from kernels.mla_decode.plan import MlaDecodePlan
from kernels.softmax.triton import LN_2, NO_KEYS

LATENT = 512
# Rows of a block, 512 bytes that lie together for eight columns; programs of 128 threads for each of the attention's.
ROWS, PER_PROGRAM = 16, 4
# As many as let a multiprocessor hold PER_PROGRAM of them: all begin at once, spread evenly.
REGISTERS = 128


@triton.jit
def unit_of(shared_ptr, unit):
    """Returns a cut unit's first row, rows, number of parts and first slot."""
    at = shared_ptr + unit * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def fold_block(partials, parts, first, row, live, column, SLOT_ROWS: tl.constexpr, SOME: tl.constexpr):
    """Returns sums [columns / 8, rows, 8] over a unit's parts, with their maximum and weights [rows]."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    # Eight values of a row, then eight of the next: as a warp of the attention holds them.
    eight = tl.arange(0, 8)[None, None, None, :]
    at = (column * SLOT_ROWS)[None, :, None, None] + (row * 8)[None, None, :, None] + eight
    acc = tl.zeros([column.shape[0], row.shape[0], 8], tl.float32)
    peak = tl.full([row.shape[0]], NO_KEYS, tl.float32)
    total = tl.zeros([row.shape[0]], tl.float32)
    for begin in tl.range(0, parts, SOME):
        part = begin + tl.arange(0, SOME)
        slot = (first + part).to(tl.int64) * SLOT_ROWS
        ok = (part < parts)[:, None] & live[None, :]
        values = tl.load(acc_ptr + (slot * 512)[:, None, None, None] + at, mask=ok[:, None, :, None], other=0.0)
        peaks = tl.load(row_max_ptr + slot[:, None] + row[None, :], mask=ok, other=NO_KEYS)
        sums = tl.load(row_sum_ptr + slot[:, None] + row[None, :], mask=ok, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        weight = tl.exp2(peaks - higher[None, :])
        keep = tl.exp2(peak - higher)
        total = total * keep + tl.sum(sums * weight, 0)
        acc = acc * keep[None, :, None] + tl.sum(values * weight[:, None, :, None], 0)
        peak = higher
    return acc, peak, total


@triton.jit
def fold_units(
    results,
    partials,
    shared_ptr,
    units,
    num_tokens,
    HEADS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):
    """Every program's blocks, of ROWS rows and LATENT / SOME columns; SOME parts of one are read at a time."""
    out_ptr, lse_ptr = results
    COLUMNS: tl.constexpr = LATENT // SOME
    ROW_BLOCKS: tl.constexpr = (SLOT_ROWS + ROWS - 1) // ROWS
    blocks = units * (ROW_BLOCKS * SOME)
    # The plan is older than the attention.
    block = tl.program_id(0)
    unit = tl.minimum(block // (ROW_BLOCKS * SOME), tl.maximum(units - 1, 0))
    first_row, rows, parts, first = unit_of(shared_ptr, unit)
    if EARLY:
        # Every program waits: one that ended before would let the next launch start before the attention is done.
        tl.extra.cuda.gdc_wait()
    while block < blocks:
        row = block // SOME % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
        column = block % SOME * COLUMNS + tl.arange(0, COLUMNS // 8) * 8
        live = row < rows
        acc, peak, total = fold_block(partials, parts, first, row, live, column, SLOT_ROWS, SOME)
        share = 1.0 / tl.where(total == 0.0, 1.0, total)
        result = tl.permute(acc * share[None, :, None], (1, 0, 2)).reshape(ROWS, COLUMNS)
        to = first_row + row
        at = to.to(tl.int64)[:, None] * LATENT + (block % SOME * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=live[:, None])
        if WANTS_LSE:
            lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * LN_2)
            lse_at = lse_ptr + (to % HEADS).to(tl.int64) * num_tokens + to // HEADS
            tl.store(lse_at, lse, mask=live & (block % SOME == 0))
        block += tl.num_programs(0)
        if block < blocks:
            first_row, rows, parts, first = unit_of(shared_ptr, block // (ROW_BLOCKS * SOME))


@triton.jit(do_not_specialize=["num_tokens"])
def fold_cuts(
    out_ptr,
    lse_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    shared_ptr,
    counts_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    EARLY: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):
    """Folds the units that the plan cut; how many there are says how."""
    units = tl.load(counts_ptr + 2)
    most = tl.num_programs(0) // (tl.maximum(units, 1) * ((SLOT_ROWS + ROWS - 1) // ROWS))
    results = (out_ptr, lse_ptr)
    partials = (acc_ptr, row_max_ptr, row_sum_ptr)
    for power in tl.static_range(2, 7):
        if ((most >> power) == 1) | ((power == 2) & (most < 4)) | ((power == 6) & (most >= 64)):
            fold_units(
                results, partials, shared_ptr, units, num_tokens,
                HEADS, SLOT_ROWS, ROWS, LATENT, 1 << power, EARLY, WANTS_LSE,
            )  # fmt: skip


def fold(plan: MlaDecodePlan, out: torch.Tensor, lse: torch.Tensor | None, *, early: bool = True) -> None:
    """Folds behind an attention that was launched just before; early: beginning while that ends."""
    fold_cuts[(PER_PROGRAM * plan.programs,)](
        out,
        lse if lse is not None else plan.row_max,
        plan.acc,
        plan.row_max,
        plan.row_sum,
        plan.shared,
        plan.counts,
        out.shape[0],
        HEADS=plan.heads,
        SLOT_ROWS=plan.slot_rows,
        ROWS=ROWS,
        LATENT=LATENT,
        EARLY=early,
        WANTS_LSE=lse is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=early,
    )
