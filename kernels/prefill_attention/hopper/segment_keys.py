"""The loop over a segment's key tiles, and the step from one segment to the next.

QK of a tile is issued before PV of the one before it, so that the tensor cores work while softmax does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.registers import settled
from kernels.hopper.softmax import first_weights, next_weights, row_sums, sums_in_two, weigh
from kernels.prefill_attention.hopper.segment_states import add_to, own_program, store_state
from kernels.prefill_attention.hopper.weights import capped, visible, zero


@gluon.jit
def _next_scores(q, p, acc, stages, step, zeros, STAGES: gl.constexpr):
    """Returns (scores of the next key tile, acc, the next step, the stage of the values being added).

    The product that adds the values of the key tile at `step` to acc still runs."""
    ks, vs, k_full, k_empty, v_full, _ = stages
    before = step % STAGES
    before_phase = (step // STAGES) & 1
    step += 1
    slot = step % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    scores = warpgroup_mma(q, ks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), before_phase)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    acc = warpgroup_mma(gl.convert_layout(p, LEFT), vs.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(slot), count=1)
    return scores, acc, step, before


@gluon.jit
def attend_keys(
    q, p, base, row_sum, acc, start, stop, step, scale, cap, hidden, stages, zeros,
    CAP: gl.constexpr, ROWWISE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Key tiles start .. stop, of one segment: their weights are made, and values added of all but the last."""
    for tile in range(start, stop):
        scores, acc, step, before = _next_scores(q, p, acc, stages, step, zeros, STAGES)
        scores = visible(capped(scores, cap, CAP, ROWWISE), tile, *hidden, 0, BN, SL)
        weights = weigh(scores, base, scale, ROWWISE)
        early, rest = sums_in_two(weights)
        early = settled(early)  # a quarter of the weights is made while the last tile's values are added
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(stages[5].index(before), count=1)
        p, sums, base, row_sum, acc = next_weights(
            scores, weights, early + rest, base, row_sum, acc, scale, p.dtype, ROWWISE
        )
        row_sum += row_sums(sums, base)
    return p, base, row_sum, acc, step


@gluon.jit
def begin_segment(
    q, p, base, row_sum, acc, tile, step, scale, cap, hidden, stages, zeros, states, folds,
    PART: gl.constexpr, CAP: gl.constexpr, ROWWISE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, RS: gl.constexpr, RO: gl.constexpr,
):  # fmt: skip
    """The first key tile of a segment that is not the first: the one before goes to the total in memory.

    A copy of the loop's body, so that nothing drains and the loop has no branch: one in it cost 7 to 10%.
    """
    scores, acc, step, before = _next_scores(q, p, acc, stages, step, zeros, STAGES)
    scores = visible(capped(scores, cap, CAP, ROWWISE), tile, *hidden, 0, BN, SL)
    next_p, next_sums, next_base = first_weights(scores, scale, p.dtype, ROWWISE)
    slot = own_program() * 2 + PART
    row = gl.arange(0, 64, RS) + zero(D)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(stages[5].index(before), count=1)
    if folds:
        base, row_sum, acc = add_to(states, slot, row, base, row_sum, acc, D, OL, RO)
    store_state(states, slot, row, base, row_sum, acc, D)
    return next_p, next_base, row_sums(next_sums, next_base), gl.zeros([64, D], gl.float32, OL), step
