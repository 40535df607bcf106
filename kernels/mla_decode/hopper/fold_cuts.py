"""Folds the partial results of a launch that was cut by load, where the attention does not.

There is no order among them, so that many are read at once.
"""

import torch
import triton
import triton.language as tl

from kernels.mla_decode.hopper.places import column_at
from kernels.mla_decode.plan import MlaDecodePlan
from kernels.softmax.triton import LN_2, NO_KEYS

LATENT = 512
# So few units leave most of the card free, and have many parts each: a row's columns are shared by two programs, each
# of which reads more parts at a time. On an H200, 128 heads, 26.1 us for 37.0 of one sequence, 58.4 for 61.9 of two;
# with 32 units it would be slower, 73.6 for 63.1.
FEW_UNITS = 4


@triton.jit(do_not_specialize=["num_tokens"])
def fold_cuts(
    out_ptr,
    lse_ptr,
    parts_ptr,
    levels_ptr,
    shared_ptr,
    counts_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    MOST: tl.constexpr,
    SOME: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):
    """COLUMNS of one row of each unit that is cut, in turn; SOME parts are read at a time, there are at most MOST."""
    row = tl.program_id(1)
    units = tl.load(counts_ptr + 2)
    # Every program waits: one that ended before would let the next launch start before the attention is done.
    tl.extra.cuda.gdc_wait()
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = place // 256 * 256 + column_at(place % 256, FEW)
    for unit in tl.range(tl.program_id(2), units, tl.num_programs(2)):
        first_row = tl.load(shared_ptr + unit * 4)
        rows = tl.load(shared_ptr + unit * 4 + 1)
        parts = tl.load(shared_ptr + unit * 4 + 2)
        first = tl.load(shared_ptr + unit * 4 + 3).to(tl.int64)
        if row < rows:
            all_parts = tl.arange(0, MOST)
            stats = first + all_parts * SLOT_ROWS + row
            levels = tl.load(levels_ptr + stats, mask=all_parts < parts, other=float("-inf"))
            peak = tl.maximum(tl.max(levels, 0), NO_KEYS)
            total = tl.sum(tl.exp2(levels - peak), 0)
            acc = tl.zeros([SOME, COLUMNS], tl.float32)
            for begin in tl.range(0, parts, SOME):
                part = begin + tl.arange(0, SOME)
                ok = part < parts
                slot = first + part * SLOT_ROWS + row
                there = tl.load(levels_ptr + slot, mask=ok, other=float("-inf"))
                values = parts_ptr + (slot * LATENT)[:, None] + place[None, :]
                acc += tl.load(values, mask=ok[:, None], other=0.0).to(tl.float32) * tl.exp2(there - peak)[:, None]
            share = 1.0 / tl.where(total == 0.0, 1.0, total)
            out = (tl.sum(acc, 0) * share).to(out_ptr.dtype.element_ty)
            to = first_row + row
            tl.store(out_ptr + to.to(tl.int64) * LATENT + column, out)
            if WANTS_LSE:  # of the same bits in every program of the row
                lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * LN_2)
                tl.store(lse_ptr + (to % HEADS).to(tl.int64) * num_tokens + to // HEADS, lse)


def fold(plan: MlaDecodePlan, num_seqs: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Folds behind an attention that was launched just before, of num_seqs sequences."""
    units = min(num_seqs * -(-plan.heads * plan.max_q_tokens // plan.rows), plan.max_shared)
    at_a_time, pieces = (32, 2) if units <= FEW_UNITS else (16, 1)
    fold_cuts[(pieces, plan.slot_rows, units)](
        out,
        lse if lse is not None else plan.levels,
        plan.parts,
        plan.levels,
        plan.shared,
        plan.counts,
        out.shape[0],
        HEADS=plan.heads,
        SLOT_ROWS=plan.slot_rows,
        MOST=max(triton.next_power_of_2(plan.programs + 1), 16),
        SOME=at_a_time,
        LATENT=LATENT,
        COLUMNS=LATENT // pieces,
        FEW=plan.transposed,
        WANTS_LSE=lse is not None,
        num_warps=4,
        launch_pdl=True,
    )
