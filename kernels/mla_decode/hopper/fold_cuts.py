"""Folds the partial results of a launch that was cut by load: no order among them, so that many are read at once."""

import torch
import triton
import triton.language as tl

from kernels.mla_decode.plan import MlaDecodePlan
from kernels.softmax.triton import LN_2, NO_KEYS

LATENT = 512
# Partial results of a row that are read at a time.
AT_A_TIME = 16


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
    MOST: tl.constexpr,
    SOME: tl.constexpr,
    LATENT: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):
    """One row of each unit that is cut, in turn; SOME parts are read at a time, MOST are the most there can be."""
    row = tl.program_id(0)
    units = tl.load(counts_ptr + 2)
    # Every program waits: one that ended before would let the next launch start before the attention is done.
    tl.extra.cuda.gdc_wait()
    d = tl.arange(0, LATENT)
    # Eight values of a row, then eight of the next: as a warp of the attention holds them.
    at = d // 8 * (SLOT_ROWS * 8) + d % 8 + row * 8
    for unit in tl.range(tl.program_id(1), units, tl.num_programs(1)):
        first_row = tl.load(shared_ptr + unit * 4)
        rows = tl.load(shared_ptr + unit * 4 + 1)
        parts = tl.load(shared_ptr + unit * 4 + 2)
        first = tl.load(shared_ptr + unit * 4 + 3).to(tl.int64)
        if row < rows:
            all_parts = tl.arange(0, MOST)
            stats = (first + all_parts) * SLOT_ROWS + row
            peaks = tl.load(row_max_ptr + stats, mask=all_parts < parts, other=NO_KEYS)
            sums = tl.load(row_sum_ptr + stats, mask=all_parts < parts, other=0.0)
            peak = tl.max(peaks, 0)
            total = tl.sum(tl.exp2(peaks - peak) * sums, 0)
            acc = tl.zeros([SOME, LATENT], tl.float32)
            for begin in tl.range(0, parts, SOME):
                part = begin + tl.arange(0, SOME)
                ok = part < parts
                slot = first + part
                there = tl.load(row_max_ptr + slot * SLOT_ROWS + row, mask=ok, other=NO_KEYS)
                values = acc_ptr + (slot * (SLOT_ROWS * LATENT))[:, None] + at[None, :]
                acc += tl.load(values, mask=ok[:, None], other=0.0) * tl.exp2(there - peak)[:, None]
            share = 1.0 / tl.where(total == 0.0, 1.0, total)
            out = (tl.sum(acc, 0) * share).to(out_ptr.dtype.element_ty)
            to = first_row + row
            tl.store(out_ptr + to.to(tl.int64) * LATENT + d, out)
            if WANTS_LSE:
                lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * LN_2)
                tl.store(lse_ptr + (to % HEADS).to(tl.int64) * num_tokens + to // HEADS, lse)


def fold(plan: MlaDecodePlan, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Folds behind an attention that was launched just before."""
    fold_cuts[(plan.slot_rows, plan.max_shared)](
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
        MOST=max(triton.next_power_of_2(plan.programs + 1), 16),
        SOME=AT_A_TIME,
        LATENT=LATENT,
        WANTS_LSE=lse is not None,
        num_warps=4,
        launch_pdl=True,
    )
