"""The outputs of a scan, by a warp group beside the chain: what a block's queries read of the state before it, and of
the block itself."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.block_scan.hopper.feed import FACTOR, GROWN, NUM_VECTORS
from kernels.block_scan.hopper.rows import clear_tail, row_of_program
from kernels.block_scan.plan import GRID_TOKENS
from kernels.hopper.barriers import thread_barrier

_GRID = gl.constexpr(GRID_TOKENS)


@gluon.jit
def make_outputs(
    out_ptr, gate_ptr, skip_ptr, cu_blocks_ptr, blocks_ptr, working_ptr, scale, stride_gate,
    qs, vs, scores, vectors, states, errors, full, empty, states_full, states_empty, errors_full, errors_empty,
    HEADS: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr, HAS_INVERSES: gl.constexpr,
    HAS_CHANNELS: gl.constexpr, HAS_SKIP: gl.constexpr, HAS_GATE: gl.constexpr, HAS_FACTORS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = qs.dtype
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BV, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OL)
    _, head, begin, end, first, count, stop = row_of_program(cu_blocks_ptr, blocks_ptr, working_ptr, HEADS)
    zeros = gl.zeros([_GRID, BV], gl.float32, OL)
    token = gl.arange(0, _GRID, ROWS)
    e = gl.program_id(1) * BV + gl.arange(0, BV, gl.SliceLayout(0, OL))
    for i in range(end - begin):
        slot = i % STAGES
        turn = i % 2
        at = slot * NUM_VECTORS
        ok = (token < count)[:, None] & (e >= 0)[None, :]
        if HAS_GATE:
            gate_at = (first + token).to(gl.int64) * stride_gate + head * DV
            gate = gl.load(gate_ptr + gate_at[:, None] + e[None, :], mask=ok, other=0.0)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        mbarrier.wait(states_full.index(turn), (i // 2) & 1)
        out = warpgroup_mma(qs.index(slot), states.index(turn).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if not HAS_CHANNELS:
            grown = vectors.index(at + GROWN).load(ROWS)
        if HAS_FACTORS:
            factors = vectors.index(at + FACTOR).load(ROWS)
        if not HAS_INVERSES:
            clear_tail(vs.index(slot), count, BV)
            if HAS_SKIP:
                # As in release_read, but while the first product runs: 8,192 tokens with a gate take 477 us of an H200
                # where they took 488 with the load and its fence behind the second product.
                x = vs.index(slot).load(OL)
                fence_async_shared()
        out = warpgroup_mma_wait(0, deps=[out])
        thread_barrier()
        mbarrier.arrive(states_empty.index(turn), count=1)
        if not HAS_CHANNELS:
            out = out * grown[:, None]
        if HAS_INVERSES:
            mbarrier.wait(errors_full.index(turn), (i // 2) & 1)
            out = warpgroup_mma(scores.index(slot), errors.index(turn).permute((1, 0)), out, is_async=True)
        else:
            out = warpgroup_mma(scores.index(slot), vs.index(slot), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        thread_barrier()
        if HAS_INVERSES:
            mbarrier.arrive(errors_empty.index(turn), count=1)
        mbarrier.arrive(empty.index(slot), count=1)
        out = out * scale
        if HAS_FACTORS:
            out = out * factors[:, None]
        if HAS_SKIP:
            out += x.to(gl.float32) * gl.load(skip_ptr + head).to(gl.float32)
        if HAS_GATE:
            wide = gate.to(gl.float32)
            out = out * (wide / (1.0 + gl.exp(-wide)))
        out_at = (first + token).to(gl.int64) * (HEADS * DV) + head * DV
        gl.store(out_ptr + out_at[:, None] + e[None, :], out.to(DTYPE), mask=ok)
        first += count
        count = gl.minimum(stop - first, _GRID)
