"""sparse_latent_attention in Gluon for Hopper: chosen latents are gathered once, as keys and as values.

gatherers    four warps that copy the chosen rows, 16 bytes a thread, tile by tile
left, right  two warpgroups of consumers (`consumers`)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.barriers import make_barriers
from kernels.sparse_latent_attention.hopper.consumers import attend_left, attend_right
from kernels.sparse_latent_attention.hopper.gather import gather


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(
    do_not_specialize=["items", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def attend_gathered(
    q_half_desc, q_rope_desc, pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, out_ptr, acc_ptr,
    row_max_ptr, row_sum_ptr, scale_log2, items, page_rows, stride_tables_seq,
    SPLITS: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], LAYOUT)
    passed = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    decays = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    folds = gl.allocate_shared_memory(gl.float32, [3, 64], VECTOR)
    shared = (q_left, q_right, q_rope, left, right, rope)
    handed = (passed, decays, folds)
    # Latents are there when the copies of all 128 gathering threads are.
    bars = (
        make_barriers(1, 1), make_barriers(1, 1), make_barriers(STAGES, 128), make_barriers(STAGES, 1),
        make_barriers(STAGES, 128), make_barriers(STAGES, 1),
    )  # fmt: skip
    hands = (make_barriers(1, 1), make_barriers(1, 1), make_barriers(1, 1), make_barriers(1, 1))
    results = (out_ptr, acc_ptr, row_max_ptr, row_sum_ptr)
    gl.warp_specialize(
        [
            (attend_left, (
                results, num_keys_ptr, scale_log2, items, shared, handed, bars, hands,
                SPLITS, PIECES, PIECE, K, HEADS, STAGES,
            )),
            (attend_right, (
                results, num_keys_ptr, items, shared, handed, bars, hands, SPLITS, PIECES, PIECE, K, HEADS, STAGES,
            )),
            (gather, (
                q_half_desc, q_rope_desc, pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, items,
                page_rows, stride_tables_seq, shared, bars, SPLITS, PIECES, PIECE, K, HEADS, PAGE, STAGES,
            )),
        ],
        [4, 4],
        [208, 88],
    )  # fmt: skip
