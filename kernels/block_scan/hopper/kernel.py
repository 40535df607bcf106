"""Scans in Gluon for Hopper: a program for a row, a head and 64 values takes the row's blocks one by one.

    boxes      one warp        q, k, v, scores, inverses of block i + 1 or i + 2 on their way to shared memory
    vectors    one warp        what each token of them is multiplied by; zeros for tokens of no row
    chain      4 warps         state(i) -> what block i reads of it -> what it writes -> state(i + 1)
    outputs    4 warps         q state(i) + scores (what block i writes)

The chain is all that takes one block after the other; it has nothing to do with outputs. Every block passes through one
loop body, products have one shape, and a tail is zeros: bits follow from the state before a block and from its tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.block_scan.hopper.chain import pass_states
from kernels.block_scan.hopper.feed import NUM_VECTORS, load_blocks, make_vectors
from kernels.block_scan.hopper.outputs import make_outputs
from kernels.block_scan.plan import GRID_TOKENS
from kernels.hopper.barriers import make_barriers
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch

_GRID = gl.constexpr(GRID_TOKENS)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_rows", "num_tokens"])
def scan_blocks(
    q_desc, k_desc, v_desc, inverses_desc, scores_desc, kept_desc, beta_ptr, sums_ptr, weights_ptr, factors_ptr,
    skip_ptr, gate_ptr, remains_ptr, states_ptr, out_ptr, cu_seqlens_ptr, cu_blocks_ptr, blocks_ptr, leave_ptr,
    working_ptr, restore_ptr, fresh_ptr, rolling_ptr, num_rows, num_tokens, scale, stride_beta, stride_gate,
    stride_slot,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr,
    HAS_INVERSES: gl.constexpr, HAS_WEIGHTS: gl.constexpr, HAS_SKIP: gl.constexpr, HAS_GATE: gl.constexpr,
    HAS_FACTORS: gl.constexpr, HAS_CHANNELS: gl.constexpr, BY_VALUE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Allocates what the partitions share, and starts them."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, _GRID, DK], q_desc.layout)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, _GRID, DK], k_desc.layout)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, _GRID, BV], v_desc.layout)
    scores = gl.allocate_shared_memory(DTYPE, [STAGES, _GRID, _GRID], scores_desc.layout)
    states = gl.allocate_shared_memory(DTYPE, [2, BV, DK], TILE)
    inverses = scores
    errors = states
    kepts = ks
    if HAS_INVERSES:
        inverses = gl.allocate_shared_memory(DTYPE, [STAGES, _GRID, _GRID], inverses_desc.layout)
        errors = gl.allocate_shared_memory(DTYPE, [2, BV, _GRID], TILE)
    if HAS_CHANNELS:
        kepts = gl.allocate_shared_memory(DTYPE, [STAGES, _GRID, DK], kept_desc.layout)
    vectors = gl.allocate_shared_memory(
        gl.float32, [STAGES * NUM_VECTORS, _GRID], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    # A block is there when its boxes and its vectors are; its place is free when the chain and the outputs are done.
    full = make_barriers(STAGES, 2)
    empty = make_barriers(STAGES, 2)
    states_full = make_barriers(2, 1)
    states_empty = make_barriers(2, 1)
    errors_full = make_barriers(2, 1)
    errors_empty = make_barriers(2, 1)
    allow_next_launch()
    wait_for_last_launch()
    # One expression: what passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (pass_states, (
                states_ptr, remains_ptr, cu_blocks_ptr, blocks_ptr, leave_ptr, working_ptr, restore_ptr, fresh_ptr,
                rolling_ptr, stride_slot, ks, vs, inverses, kepts, vectors, states, errors, full, empty,
                states_full, states_empty, errors_full, errors_empty,
                HEADS, GROUP, DK, DV, BV, HAS_INVERSES, HAS_CHANNELS, BY_VALUE, STAGES,
            )),
            (make_outputs, (
                out_ptr, gate_ptr, skip_ptr, cu_blocks_ptr, blocks_ptr, working_ptr, scale, stride_gate,
                qs, vs, scores, vectors, states, errors, full, empty, states_full, states_empty, errors_full,
                errors_empty,
                HEADS, DV, BV, HAS_INVERSES, HAS_CHANNELS, HAS_SKIP, HAS_GATE, HAS_FACTORS, STAGES,
            )),
            (load_blocks, (
                q_desc, k_desc, v_desc, inverses_desc, scores_desc, kept_desc, cu_blocks_ptr, blocks_ptr, working_ptr,
                qs, ks, vs, inverses, scores, kepts, full, empty,
                HEADS, GROUP, DK, DV, BV, HAS_INVERSES, HAS_CHANNELS, STAGES,
            )),
            (make_vectors, (
                sums_ptr, weights_ptr, beta_ptr, factors_ptr, out_ptr, cu_seqlens_ptr, cu_blocks_ptr, blocks_ptr,
                working_ptr, num_rows, num_tokens, stride_beta, vectors, full, empty,
                HEADS, DV, BV, HAS_INVERSES, HAS_WEIGHTS, HAS_FACTORS, HAS_CHANNELS, STAGES,
            )),
        ],
        [4, 1, 1],
        [160, 32, 48],
    )  # fmt: skip
