"""The producers of a scan: one warp copies the rows of each block, another computes the factors of its tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.block_scan.hopper.rows import clear_uncovered, row_of_program
from kernels.block_scan.plan import GRID_TOKENS
from kernels.hopper.barriers import thread_barrier

_GRID = gl.constexpr(GRID_TOKENS)

# Vectors of a block, [GRID] in fp32 each: with G the running sum of log decays at a token and w its weight,
#   READ     -exp(G) w beta (with decays of channels -beta): factor of k S
#   BETA     beta: factor of a value
#   ADDED    exp(last G - G) w: share of a token's contribution that remains after the block
#   GROWN    exp(G): share of the state before the block that remains at a token
#   FACTOR   of an output
#   REMAINS  exp(last G), GRID times: share of the state before the block that remains after it
NUM_VECTORS = gl.constexpr(6)
READ, BETA, ADDED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
GROWN, FACTOR, REMAINS = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5)


@gluon.jit
def load_blocks(
    q_desc, k_desc, v_desc, inverses_desc, scores_desc, kept_desc, cu_blocks_ptr, blocks_ptr, working_ptr,
    qs, ks, vs, inverses, scores, kepts, full, empty,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr,
    HAS_INVERSES: gl.constexpr, HAS_CHANNELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings GRID rows of each block, whatever it holds: those behind its tokens are masked or cleared where they are
    used. What the chain waits for comes first."""
    _, head, begin, end, first, count, _ = row_of_program(cu_blocks_ptr, blocks_ptr, working_ptr, HEADS)
    column = gl.program_id(1) * BV
    BYTES: gl.constexpr = (
        2 * _GRID * (2 * DK + BV + _GRID + (_GRID if HAS_INVERSES else 0) + (DK if HAS_CHANNELS else 0))
    )
    for i in range(end - begin):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, BYTES)
        k_column = head // GROUP * DK
        tma.async_copy_global_to_shared(k_desc, [first, k_column], bar, ks.index(slot))
        tma.async_copy_global_to_shared(v_desc, [first, head * DV + column], bar, vs.index(slot))
        if HAS_INVERSES:
            tma.async_copy_global_to_shared(inverses_desc, [first, head * _GRID], bar, inverses.index(slot))
        if HAS_CHANNELS:
            tma.async_copy_global_to_shared(kept_desc, [first, k_column], bar, kepts.index(slot))
        tma.async_copy_global_to_shared(q_desc, [first, k_column], bar, qs.index(slot))
        tma.async_copy_global_to_shared(scores_desc, [first, head * _GRID], bar, scores.index(slot))
        first = gl.where(i == 0, first + count, first + _GRID)


@gluon.jit
def load_scalars(
    sums_ptr, weights_ptr, beta_ptr, factors_ptr, first, count, head, stride_beta,
    HEADS: gl.constexpr, HAS_INVERSES: gl.constexpr, HAS_WEIGHTS: gl.constexpr, HAS_FACTORS: gl.constexpr,
    HAS_CHANNELS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Returns (sums of log decays, weights, betas, factors) of a block's tokens, fp32 [GRID] each."""
    token = gl.arange(0, _GRID, L)
    ok = token < count
    at = (first + token).to(gl.int64)
    zeros = gl.zeros([_GRID], gl.float32, L)
    sums = zeros
    weights = zeros + 1.0
    beta = zeros
    factors = zeros + 1.0
    if not HAS_CHANNELS:
        sums = gl.load(sums_ptr + at * HEADS + head, mask=ok, other=0.0)
    if HAS_WEIGHTS:
        weights = gl.load(weights_ptr + at * HEADS + head, mask=ok, other=0.0)
    if HAS_INVERSES:
        beta = gl.load(beta_ptr + at * stride_beta + head, mask=ok, other=0.0).to(gl.float32)
    if HAS_FACTORS:
        factors = gl.load(factors_ptr + at * HEADS + head, mask=ok, other=0.0)
    return sums, weights, beta, factors


@gluon.jit
def make_vectors(
    sums_ptr, weights_ptr, beta_ptr, factors_ptr, out_ptr, cu_seqlens_ptr, cu_blocks_ptr, blocks_ptr, working_ptr,
    num_rows, num_tokens, stride_beta, vectors, full, empty,
    HEADS: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr, HAS_INVERSES: gl.constexpr, HAS_WEIGHTS: gl.constexpr,
    HAS_FACTORS: gl.constexpr, HAS_CHANNELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes the factors of a block's tokens in one warp, which loads one block ahead; then writes the zeros of
    `clear_uncovered`."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    _, head, begin, end, first, count, stop = row_of_program(cu_blocks_ptr, blocks_ptr, working_ptr, HEADS)
    token = gl.arange(0, _GRID, L)
    zeros = gl.zeros([_GRID], gl.float32, L)
    sums, weights, beta, factors = load_scalars(
        sums_ptr, weights_ptr, beta_ptr, factors_ptr, first, count, head, stride_beta,
        HEADS, HAS_INVERSES, HAS_WEIGHTS, HAS_FACTORS, HAS_CHANNELS, L,
    )  # fmt: skip
    for i in range(end - begin):
        slot = i % STAGES
        first += count
        ahead = gl.maximum(gl.minimum(stop - first, _GRID), 0)
        next_sums, next_weights, next_beta, next_factors = load_scalars(
            sums_ptr, weights_ptr, beta_ptr, factors_ptr, first, ahead, head, stride_beta,
            HEADS, HAS_INVERSES, HAS_WEIGHTS, HAS_FACTORS, HAS_CHANNELS, L,
        )  # fmt: skip
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        at = slot * NUM_VECTORS
        if HAS_INVERSES:
            vectors.index(at + BETA).store(beta)
        if HAS_CHANNELS:
            vectors.index(at + READ).store(-1.0 * beta)
        else:
            total = gl.sum(gl.where(token == count - 1, sums, 0.0), 0)
            grown = gl.exp(sums)
            part = gl.exp(total - sums)
            decay = grown
            if HAS_WEIGHTS:
                part = part * weights
                decay = decay * weights
            if HAS_INVERSES:
                vectors.index(at + READ).store(-1.0 * (decay * beta))
            vectors.index(at + ADDED).store(part)
            vectors.index(at + GROWN).store(grown)
            vectors.index(at + REMAINS).store(zeros + gl.exp(total))
        if HAS_FACTORS:
            vectors.index(at + FACTOR).store(factors)
        thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)
        sums = next_sums
        weights = next_weights
        beta = next_beta
        factors = next_factors
        count = ahead
    clear_uncovered(out_ptr, cu_seqlens_ptr, working_ptr, num_rows, num_tokens, HEADS, DV, BV)
