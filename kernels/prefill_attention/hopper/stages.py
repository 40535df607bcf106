"""How a consumer takes queries and the first key tile of its work, and how it passes over work of the other one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import thread_barrier
from kernels.prefill_attention.hopper.weights import narrow


@gluon.jit
def take_queries(
    qs, scale_log2, cap_log2,
    PART: gl.constexpr, CAP: gl.constexpr, NARROWS: gl.constexpr, Q_REGISTERS: gl.constexpr,
    QL: gl.constexpr, RS: gl.constexpr,
):  # fmt: skip
    """Returns (queries as products read them, factor of scores, factor of scores before they are capped).

    Narrowed queries have units of their own: each row's goes to where its scores are scaled.
    """
    q = qs.index(PART).load(QL) if Q_REGISTERS else qs.index(PART)
    scale = scale_log2
    cap = cap_log2
    if NARROWS:
        q, unit = narrow(q)
        unit = gl.convert_layout(unit, RS)
        if CAP:
            cap = cap_log2 * unit
            scale = scale_log2 + gl.zeros_like(unit)
        else:
            scale = scale_log2 * unit
    return q, scale, cap


@gluon.jit
def first_scores(q, ks, k_full, k_empty, q_empty, zeros, step, Q_REGISTERS: gl.constexpr, STAGES: gl.constexpr):
    """Returns the scores of the first key tile: there is no earlier one whose values could be added meanwhile."""
    slot = step % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    scores = warpgroup_mma(q, ks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(slot), count=1)
    if Q_REGISTERS:
        # Only a product that took the queries proves that they have come out of shared memory: loads may queue
        # behind the last tile's stores, where barriers overtake them and the copy engine would, too.
        mbarrier.arrive(q_empty.index(0), count=1)
    return scores


@gluon.jit
def pass_over(k_full, k_empty, v_full, v_empty, tiles, step, STAGES: gl.constexpr):
    """Gives key tiles back unread; returns the step behind them."""
    for _tile in range(tiles):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.wait(v_full.index(slot), phase)
        # All warps have seen this phase before the next one can begin.
        thread_barrier()
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.arrive(v_empty.index(slot), count=1)
        step += 1
    return step
