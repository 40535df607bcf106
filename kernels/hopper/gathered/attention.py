"""Attention over lists of gathered keys in Gluon for Hopper: a key is gathered once, as key and as value.

gatherers    four warps that copy a list's keys, 16 bytes a thread, tile by tile
left, right  two warpgroups of consumers (`consumers`)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import make_barriers
from kernels.hopper.gathered.consumers import attend_left, attend_right
from kernels.hopper.gathered.gather import gather


@gluon.jit
def attend_lists(
    queries, keys, results, scale_log2, items,
    COUNT: gl.constexpr, LIST: gl.constexpr, ROWS: gl.constexpr, ADDRESSES: gl.constexpr,
    SPLITS: gl.constexpr, pieces, PIECE: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Called by a kernel of four warps. A key has 512 + ROPE elements, of which the first 512 are its value.

    queries  descriptors of boxes of 256 columns and, where ROPE, of ROPE columns
    results  out, fp32 sinks of each head or None, partial sums, their maxima, their sums of weights
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, ROPE], LAYOUT) if ROPE else q_left
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, ROPE], LAYOUT) if ROPE else left
    passed = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    decays = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    folds = gl.allocate_shared_memory(gl.float32, [3, 64], VECTOR)
    shared = (q_left, q_right, q_rope, left, right, rope)
    handed = (passed, decays, folds)
    # Keys are there when the copies of all 128 gathering threads are.
    bars = (
        make_barriers(1, 1), make_barriers(1, 1), make_barriers(STAGES, 128), make_barriers(STAGES, 1),
        make_barriers(STAGES, 128), make_barriers(STAGES, 1),
    )  # fmt: skip
    hands = (make_barriers(1, 1), make_barriers(1, 1), make_barriers(1, 1), make_barriers(1, 1))
    gl.warp_specialize(
        [
            (attend_left, (
                results, keys, scale_log2, items, shared, handed, bars, hands,
                COUNT, SPLITS, pieces, PIECE, HEADS, ROPE, STAGES,
            )),
            (attend_right, (
                results, keys, items, shared, handed, bars, hands, COUNT, SPLITS, pieces, PIECE, HEADS, STAGES,
            )),
            (gather, (
                queries, keys, items, shared, bars, COUNT, LIST, ROWS, ADDRESSES,
                SPLITS, pieces, PIECE, HEADS, ROPE, STAGES,
            )),
        ],
        [4, 4],
        [208, 88],
    )  # fmt: skip
