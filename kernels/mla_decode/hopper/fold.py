"""Folds the partial results of a planned launch: a launch of its own, so that many programs share the reading.

It is launched before the parts are there, and waits. Where heads are few, leaves are folded in ascending order, to
their group first; parts of 16 bits are inner sums of the tree in nodes.py, and are folded as that goes on.
"""

import torch
import triton
import triton.language as tl

from kernels.mla_decode.hopper.places import column_at
from kernels.mla_decode.plan import MlaDecodePlan
from kernels.softmax.triton import LN_2, NO_KEYS

LATENT = 512
# More programs take longer to find that there is nothing to fold than fewer take to fold.
PROGRAMS = 1024
# Of parts of 16 bits a thread has eight columns: with four, 64 x 8,192 with 64 heads take 180.0 us for 177.7 (H200).
WARPS = 2


@triton.jit
def joined(acc, row_max, row_sum, part):
    """Returns the softmax state of a sum and one more part."""
    part_acc, part_max, part_sum = part
    new_max = tl.maximum(row_max, part_max)
    keep = tl.exp2(row_max - new_max)
    weight = tl.exp2(part_max - new_max)
    acc = tl.fma(acc, tl.zeros_like(acc) + keep, part_acc * weight)
    return acc, new_max, tl.fma(row_sum, keep, part_sum * weight)


@triton.jit
def level_of(base, row_sum):
    """Returns the logarithm to base 2 of a sum of weights relative to a whole number; whole.py rounds identically."""
    bits = row_sum.to(tl.int32, bitcast=True)
    share = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return base + ((bits >> 23) - 127).to(tl.float32) + tl.log2(share)


@triton.jit
def load_part(partials, slot, ok, at, row, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """Returns a part's softmax state; one without keys where not ok."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    acc = tl.load(acc_ptr + slot * (ROWS * LATENT) + at, mask=ok, other=0.0).to(tl.float32)
    row_max = tl.load(row_max_ptr + slot * ROWS + row, mask=ok, other=NO_KEYS)
    return acc, row_max, tl.load(row_sum_ptr + slot * ROWS + row, mask=ok, other=0.0)


@triton.jit
def load_four(partials, first, count, at, row, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """Returns four parts, of which there are `count`."""
    a = load_part(partials, first, count > 0, at, row, ROWS, LATENT)
    b = load_part(partials, first + 1, count > 1, at, row, ROWS, LATENT)
    c = load_part(partials, first + 2, count > 2, at, row, ROWS, LATENT)
    d = load_part(partials, first + 3, count > 3, at, row, ROWS, LATENT)
    return a, b, c, d


@triton.jit
def add_four(state, parts):
    """Returns a softmax state with four more parts, in order."""
    acc, row_max, row_sum = state
    acc, row_max, row_sum = joined(acc, row_max, row_sum, parts[0])
    acc, row_max, row_sum = joined(acc, row_max, row_sum, parts[1])
    acc, row_max, row_sum = joined(acc, row_max, row_sum, parts[2])
    acc, row_max, row_sum = joined(acc, row_max, row_sum, parts[3])
    return acc, row_max, row_sum


@triton.jit
def no_keys(LATENT: tl.constexpr):
    return tl.zeros([LATENT], tl.float32), tl.full([], NO_KEYS, tl.float32), 0.0


@triton.jit
def fold_parts(partials, first, count, at, row, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """Returns the sum of these parts, in order; loads of four are in flight at a time."""
    acc, row_max, row_sum = no_keys(LATENT)
    for part in tl.range(0, count, 4):
        parts = load_four(partials, first + part, count - part, at, row, ROWS, LATENT)
        acc, row_max, row_sum = add_four((acc, row_max, row_sum), parts)
    return acc, row_max, row_sum


@triton.jit
def neighbours(a, b, is_rounded):
    """Returns the sum of two neighbours in the tree of nodes.py, rounded to bf16 unless it is the root."""
    acc, row_max, row_sum = joined(a[0], a[1], a[2], b)
    if is_rounded:
        acc = acc.to(tl.bfloat16).to(tl.float32)
    return acc, row_max, row_sum


@triton.jit
def four(parts, of_all):
    """Returns the sum of four neighbours, as a tree."""
    left = neighbours(parts[0], parts[1], of_all > 2)
    return neighbours(left, neighbours(parts[2], parts[3], of_all > 2), of_all > 4)


@triton.jit
def eight(partials, first, count, of_all, at, row, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """Returns the sum, as a tree, of up to eight neighbours, `count` of which exist. All are read at once."""
    if count <= 2:
        a = load_part(partials, first, count > 0, at, row, ROWS, LATENT)
        b = load_part(partials, first + 1, count > 1, at, row, ROWS, LATENT)
        acc, row_max, row_sum = neighbours(a, b, of_all > 2)
    elif count <= 4:
        acc, row_max, row_sum = four(load_four(partials, first, count, at, row, ROWS, LATENT), of_all)
    else:
        a = load_four(partials, first, count, at, row, ROWS, LATENT)
        b = load_four(partials, first + 4, count - 4, at, row, ROWS, LATENT)
        acc, row_max, row_sum = neighbours(four(a, of_all), four(b, of_all), of_all > 8)
    return acc, row_max, row_sum


@triton.jit
def taken(kept, number, level):
    """Returns the kept sum of a level."""
    acc, row_max, row_sum = kept
    return (
        tl.sum(tl.where((number == level)[:, None], acc, 0.0), 0),
        tl.sum(tl.where(number == level, row_max, 0.0), 0),
        tl.sum(tl.where(number == level, row_sum, 0.0), 0),
    )


@triton.jit
def fold_eights(partials, first, count, at, row, ROWS: tl.constexpr, LATENT: tl.constexpr, LEVELS: tl.constexpr):
    """Returns the sum of more than eight parts as a tree; of each of LEVELS levels at most one sum is kept."""
    number = tl.arange(0, LEVELS)
    accs = tl.zeros([LEVELS, LATENT], tl.float32)
    maxima, sums = tl.zeros([LEVELS], tl.float32), tl.zeros([LEVELS], tl.float32)
    acc, row_max, row_sum = no_keys(LATENT)
    last = (count - 1) // 8
    for i in tl.range(0, last + 1):
        acc, row_max, row_sum = eight(partials, first + i * 8, count - i * 8, count, at, row, ROWS, LATENT)
        ends = (~i & (i + 1)) - 1  # levels, as bits, of the kept sums that end here
        if i == last:
            ends = i
        level = 0
        while ends > 0:
            if ends % 2 == 1:
                left = taken((accs, maxima, sums), number, level)
                acc, row_max, row_sum = neighbours(left, (acc, row_max, row_sum), (i < last) | (ends > 1))
            ends = ends // 2
            level += 1
        accs = tl.where((number == level)[:, None], acc[None, :], accs)
        maxima, sums = tl.where(number == level, row_max, maxima), tl.where(number == level, row_sum, sums)
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
    WHOLE: tl.constexpr,
    LEVELS: tl.constexpr,
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
    # Eight values of a row (of parts of 16 bits 32 places), then of the next: as a warp of the attention holds them.
    WIDE: tl.constexpr = 32 if WHOLE else 8
    at = d // WIDE * (SLOT_ROWS * WIDE) + d % WIDE + row % ROWS * WIDE
    column = d
    if WHOLE:
        column = d // 256 * 256 + column_at(d % 256, False)
    while index < sequences:
        if row < rows:
            if WHOLE:
                acc, row_max, row_sum = no_keys(LATENT)
                if parts <= 8:
                    acc, row_max, row_sum = eight(partials, first, parts, parts, at, row % ROWS, SLOT_ROWS, LATENT)
                else:
                    if LEVELS > 0:
                        acc, row_max, row_sum = fold_eights(
                            partials, first, parts, at, row % ROWS, SLOT_ROWS, LATENT, LEVELS
                        )
            elif per_group == 1:
                acc, row_max, row_sum = fold_parts(partials, first, parts, at, row % ROWS, SLOT_ROWS, LATENT)
            else:
                acc, row_max, row_sum = no_keys(LATENT)
                for start in tl.range(0, parts, per_group):
                    some = tl.minimum(per_group, parts - start)
                    group = fold_parts(partials, first + start, some, at, row % ROWS, SLOT_ROWS, LATENT)
                    acc, row_max, row_sum = joined(acc, row_max, row_sum, group)
            share = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
            tl.store(out_ptr + (q_start * HEADS + row) * LATENT + column, (acc * share).to(out_ptr.dtype.element_ty))
            if WANTS_LSE:
                level = row_max + tl.log2(row_sum)
                if WHOLE:
                    level = level_of(row_max, row_sum)
                lse = tl.where(row_sum == 0.0, float("-inf"), level * LN_2)
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
        WHOLE=not plan.transposed,
        LEVELS=0
        if plan.transposed or plan.leaves <= 8
        else max(triton.next_power_of_2((plan.leaves - 1).bit_length() - 3 + 1), 2),
        ROWS=plan.rows,
        SLOT_ROWS=plan.slot_rows,
        LATENT=LATENT,
        WANTS_LSE=lse is not None,
        num_warps=4 if plan.transposed else WARPS,
        launch_pdl=True,
    )
