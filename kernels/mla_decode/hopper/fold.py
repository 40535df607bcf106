"""What a planned launch left as partial results, folded: a launch of its own, since many programs share the reading.

Knows no latents. It is launched before the parts are there, and waits; leaves are folded in ascending order, to their
group first where the plan's tree has groups.
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
    """A product that no sum swallows: rounded here, and again where it is added, as in the attention's `join`."""
    return tl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, factor], tl.float32, True, 1)


@triton.jit
def plus(x, y):
    return tl.inline_asm_elementwise("add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)


@triton.jit
def joined(acc, peak, total, part, GROUP: tl.constexpr):
    """A sum and one more part of it: what both become."""
    part_acc, part_peak, part_total = part
    if GROUP == 1:  # noqa: SIM108 - a conditional expression would compute both
        # The reference moves only where a leaf rises far above it.
        new_peak = tl.where(part_peak > peak + 64.0, part_peak, peak)
    else:
        new_peak = tl.maximum(peak, part_peak)
    keep = tl.exp2(peak - new_peak)
    weight = tl.exp2(part_peak - new_peak)
    zeros = tl.zeros_like(acc)
    if GROUP == 1:
        acc = plus(scaled(acc, zeros + keep), scaled(part_acc, zeros + weight))
    else:
        acc = tl.fma(acc, zeros + keep, part_acc * weight)
    return acc, new_peak, tl.fma(total, keep, part_total * weight)


@triton.jit
def load_part(partials, slot, ok, at, row, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """A part, or what changes no sum."""
    acc_ptr, peak_ptr, total_ptr = partials
    acc = tl.load(acc_ptr + slot * (ROWS * LATENT) + at, mask=ok, other=0.0)
    peak = tl.load(peak_ptr + slot * ROWS + row, mask=ok, other=NO_KEYS)
    return acc, peak, tl.load(total_ptr + slot * ROWS + row, mask=ok, other=0.0)


@triton.jit
def fold_parts(partials, first, count, at, row, GROUP: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """The sum of so many parts, four of them on their way at a time."""
    peak = tl.full([], NO_KEYS, tl.float32)
    total = 0.0
    acc = tl.zeros([LATENT], tl.float32)
    for part in tl.range(0, count, 4):
        a = load_part(partials, first + part, part < count, at, row, ROWS, LATENT)
        b = load_part(partials, first + part + 1, part + 1 < count, at, row, ROWS, LATENT)
        c = load_part(partials, first + part + 2, part + 2 < count, at, row, ROWS, LATENT)
        d = load_part(partials, first + part + 3, part + 3 < count, at, row, ROWS, LATENT)
        acc, peak, total = joined(acc, peak, total, a, GROUP)
        acc, peak, total = joined(acc, peak, total, b, GROUP)
        acc, peak, total = joined(acc, peak, total, c, GROUP)
        acc, peak, total = joined(acc, peak, total, d, GROUP)
    return acc, peak, total


@triton.jit(do_not_specialize=["num_tokens"])
def fold_shared(
    out_ptr,
    lse_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    shared_ptr,
    counts_ptr,
    num_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):
    row = tl.program_id(0)
    per_group = GROUP // tl.load(counts_ptr + 1)
    sequences = tl.load(counts_ptr + 2)
    # Nobody may end before it, or what comes after this launch would not wait for the attention.
    tl.extra.cuda.gdc_wait()
    partials = (acc_ptr, peak_ptr, total_ptr)
    d = tl.arange(0, LATENT)
    # Eight numbers of a row, then the next row's: as a warp of the attention holds them.
    at = d // 8 * (SLOT_ROWS * 8) + d % 8 + row % ROWS * 8
    for index in tl.range(tl.program_id(1), sequences, tl.num_programs(1)):
        q_start = tl.load(shared_ptr + index * 4).to(tl.int64)
        rows = tl.load(shared_ptr + index * 4 + 1) * HEADS
        parts = tl.load(shared_ptr + index * 4 + 2)
        first = tl.load(shared_ptr + index * 4 + 3).to(tl.int64) + row // ROWS * parts
        if row < rows:
            if (GROUP == 1) | (per_group == 1):
                acc, peak, total = fold_parts(partials, first, parts, at, row % ROWS, GROUP, SLOT_ROWS, LATENT)
            else:
                peak = tl.full([], NO_KEYS, tl.float32)
                total = 0.0
                acc = tl.zeros([LATENT], tl.float32)
                for start in tl.range(0, parts, per_group):
                    group = fold_parts(
                        partials, first + start, tl.minimum(per_group, parts - start), at, row % ROWS,
                        GROUP, SLOT_ROWS, LATENT,
                    )  # fmt: skip
                    acc, peak, total = joined(acc, peak, total, (group[0], group[1], group[2]), GROUP)
            share = 1.0 / tl.where(total == 0.0, 1.0, total)
            tl.store(out_ptr + (q_start * HEADS + row) * LATENT + d, (acc * share).to(out_ptr.dtype.element_ty))
            if WANTS_LSE:
                lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * LN_2)
                tl.store(lse_ptr + (row % HEADS).to(tl.int64) * num_tokens + q_start + row // HEADS, lse)


def fold(plan: MlaDecodePlan, num_seqs: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Folds behind an attention that was launched just before; each sequence that it shared out is in the plan."""
    rows = plan.heads * plan.max_q_tokens
    fold_shared[(rows, min(num_seqs, max(PROGRAMS // rows, 1)))](
        out,
        lse if lse is not None else plan.peak,
        plan.acc,
        plan.peak,
        plan.total,
        plan.shared,
        plan.counts,
        out.shape[0],
        HEADS=plan.heads,
        GROUP=plan.tree.group,
        ROWS=plan.rows,
        SLOT_ROWS=plan.slot_rows,
        LATENT=LATENT,
        WANTS_LSE=lse is not None,
        num_warps=4,
        launch_pdl=True,
    )
