"""Folds the partial results of a planned launch: a launch of its own, so that many programs share the reading.

It is launched before the parts are there, and waits; leaves are folded in ascending order, to their group first where
the plan's tree has groups.
"""

import torch
import triton
import triton.language as tl

from kernels.mla_decode.plan import MlaDecodePlan
from kernels.softmax.triton import LN_2, NO_KEYS

LATENT = 512
# More programs take longer to find that there is nothing to fold than fewer take to fold.
PROGRAMS = 1024


@triton.jit
def scaled(x, factor):
    """Returns the rounded product, never contracted into an FMA: leaves.py rounds identically."""
    return tl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, factor], tl.float32, True, 1)


@triton.jit
def plus(x, y):
    return tl.inline_asm_elementwise("add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)


@triton.jit
def joined(acc, row_max, row_sum, part, LEAVES_PER_GROUP: tl.constexpr):
    """Returns the softmax state of a sum and one more part."""
    part_acc, part_max, part_sum = part
    if LEAVES_PER_GROUP == 1:
        # The reference moves only where a leaf rises far above it.
        new_max = tl.where(part_max > row_max + 64.0, part_max, row_max)
    else:
        new_max = tl.maximum(row_max, part_max)
    keep = tl.exp2(row_max - new_max)
    weight = tl.exp2(part_max - new_max)
    zeros = tl.zeros_like(acc)
    if LEAVES_PER_GROUP == 1:
        acc = plus(scaled(acc, zeros + keep), scaled(part_acc, zeros + weight))
    else:
        acc = tl.fma(acc, zeros + keep, part_acc * weight)
    return acc, new_max, tl.fma(row_sum, keep, part_sum * weight)


@triton.jit
def load_part(partials, slot, ok, at, row, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """Returns a part's softmax state; one without keys where not ok."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    acc = tl.load(acc_ptr + slot * (ROWS * LATENT) + at, mask=ok, other=0.0)
    row_max = tl.load(row_max_ptr + slot * ROWS + row, mask=ok, other=NO_KEYS)
    return acc, row_max, tl.load(row_sum_ptr + slot * ROWS + row, mask=ok, other=0.0)


@triton.jit
def fold_parts(
    partials, first, count, at, row, LEAVES_PER_GROUP: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr
):
    """Returns the sum of these parts, in order; loads of four are in flight at a time."""
    row_max = tl.full([], NO_KEYS, tl.float32)
    row_sum = 0.0
    acc = tl.zeros([LATENT], tl.float32)
    for part in tl.range(0, count, 4):
        a = load_part(partials, first + part, part < count, at, row, ROWS, LATENT)
        b = load_part(partials, first + part + 1, part + 1 < count, at, row, ROWS, LATENT)
        c = load_part(partials, first + part + 2, part + 2 < count, at, row, ROWS, LATENT)
        d = load_part(partials, first + part + 3, part + 3 < count, at, row, ROWS, LATENT)
        acc, row_max, row_sum = joined(acc, row_max, row_sum, a, LEAVES_PER_GROUP)
        acc, row_max, row_sum = joined(acc, row_max, row_sum, b, LEAVES_PER_GROUP)
        acc, row_max, row_sum = joined(acc, row_max, row_sum, c, LEAVES_PER_GROUP)
        acc, row_max, row_sum = joined(acc, row_max, row_sum, d, LEAVES_PER_GROUP)
    return acc, row_max, row_sum


@triton.jit
def unit_of(shared_ptr, index, row, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Returns a sequence's first query, its rows and parts, and the slot of the first part of a row."""
    at = shared_ptr + index * 4
    parts = tl.load(at + 2)
    first = tl.load(at + 3).to(tl.int64) + row // ROWS * parts
    return tl.load(at).to(tl.int64), tl.load(at + 1) * HEADS, parts, first


@triton.jit(do_not_specialize=["num_tokens"])
def fold_shared(
    out_ptr,
    lse_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    shared_ptr,
    counts_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    LEAVES_PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):
    row = tl.program_id(0)
    per_group = LEAVES_PER_GROUP // tl.load(counts_ptr + 1)
    sequences = tl.load(counts_ptr + 2)
    index = tl.program_id(1)
    q_start, rows, parts, first = unit_of(shared_ptr, index, row, HEADS, ROWS)
    # Every program waits: one that ended before would let the next launch start before the attention is done.
    tl.extra.cuda.gdc_wait()
    partials = (acc_ptr, row_max_ptr, row_sum_ptr)
    d = tl.arange(0, LATENT)
    # Eight values of a row, then eight of the next: as a warp of the attention holds them.
    at = d // 8 * (SLOT_ROWS * 8) + d % 8 + row % ROWS * 8
    while index < sequences:
        if row < rows:
            if (LEAVES_PER_GROUP == 1) | (per_group == 1):
                acc, row_max, row_sum = fold_parts(
                    partials, first, parts, at, row % ROWS, LEAVES_PER_GROUP, SLOT_ROWS, LATENT
                )
            else:
                row_max = tl.full([], NO_KEYS, tl.float32)
                row_sum = 0.0
                acc = tl.zeros([LATENT], tl.float32)
                for start in tl.range(0, parts, per_group):
                    group = fold_parts(
                        partials, first + start, tl.minimum(per_group, parts - start), at, row % ROWS,
                        LEAVES_PER_GROUP, SLOT_ROWS, LATENT,
                    )  # fmt: skip
                    acc, row_max, row_sum = joined(
                        acc, row_max, row_sum, (group[0], group[1], group[2]), LEAVES_PER_GROUP
                    )
            share = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
            tl.store(out_ptr + (q_start * HEADS + row) * LATENT + d, (acc * share).to(out_ptr.dtype.element_ty))
            if WANTS_LSE:
                lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
                tl.store(lse_ptr + (row % HEADS).to(tl.int64) * num_tokens + q_start + row // HEADS, lse)
        index += tl.num_programs(1)
        q_start, rows, parts, first = unit_of(shared_ptr, tl.minimum(index, sequences - 1), row, HEADS, ROWS)


def fold(plan: MlaDecodePlan, num_seqs: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Folds behind an attention that was launched just before; each sequence that it shared out is in the plan."""
    rows = plan.heads * plan.max_q_tokens
    fold_shared[(rows, min(num_seqs, max(PROGRAMS // rows, 1)))](
        out,
        lse if lse is not None else plan.row_max,
        plan.acc,
        plan.row_max,
        plan.row_sum,
        plan.shared,
        plan.counts,
        out.shape[0],
        HEADS=plan.heads,
        LEAVES_PER_GROUP=plan.tree.leaves_per_group,
        ROWS=plan.rows,
        SLOT_ROWS=plan.slot_rows,
        LATENT=LATENT,
        WANTS_LSE=lse is not None,
        num_warps=4,
        launch_pdl=True,
    )
