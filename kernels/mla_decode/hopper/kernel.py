"""mla_decode in Gluon for Hopper: a tile of latents is loaded once and serves as keys and as values.

The arithmetic is a fixed tree over a sequence's own positions (tiles of TILE latents, leaves of LEAF, folded in
ascending order), so its bits are the same whichever program computes which part.

    warps          work on a tile of 64 rows (query heads, tokens) and TILE latents
    producer       copies the latents, a page's rows at a time, and the queries
    left           scores = q . latent over all 576 dimensions, softmax, weights to shared memory; values 0 .. 255
    right          takes the weights; values 256 .. 511; it computes while left does the next softmax
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.mla_decode.hopper.left_consumer import attend_left
from kernels.mla_decode.hopper.right_consumer import attend_right
from kernels.mla_decode.hopper.stream import stream


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_latents(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    out_ptr,
    lse_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    sum_ptr,
    items_ptr,
    counts_ptr,
    tables_ptr,
    scale_log2,
    num_tokens,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HANDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * TILE, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], LAYOUT)
    handed = gl.allocate_shared_memory(gl.bfloat16, [64, TILE], HANDED)
    decays = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    folds = gl.allocate_shared_memory(gl.float32, [4, 64], VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    left_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    hand_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    hand_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    fold_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    fold_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], VECTOR)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for s in gl.static_range(2):
        mbarrier.init(queue_full.index(s), count=1)
        mbarrier.init(queue_empty.index(s), count=2)
    work = (queue, queue_full, queue_empty)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(hand_full, count=1)
    mbarrier.init(hand_empty, count=1)
    mbarrier.init(fold_full, count=1)
    mbarrier.init(fold_empty, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(left_full.index(s), count=1)
        mbarrier.init(left_empty.index(s), count=1)
        mbarrier.init(right_full.index(s), count=1)
        mbarrier.init(right_empty.index(s), count=1)
    plan = (items_ptr, counts_ptr, tables_ptr)
    results = (out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr, sum_ptr)
    shared = ((q_left, q_right, q_rope, left, right, rope), (handed, decays, folds))
    bars = (
        (q_full, q_empty, left_full, left_empty, right_full, right_empty),
        (hand_full, hand_empty, fold_full, fold_empty),
    )
    # fmt: off
    gl.warp_specialize(
        [
            (attend_left, (results, scale_log2, shared, bars, work,
                            HEADS, LEAF, TILE, STAGES, MULTI, SLOT_ROWS, WANTS_LSE)),
            (attend_right, (results, num_tokens, shared, bars, work,
                            HEADS, LEAF, TILE, STAGES, MULTI, SLOT_ROWS, WANTS_LSE)),
            (stream, (q_half_desc, q_rope_desc, half_desc, rope_desc, plan, page_rows, stride_tables_seq,
                        shared, bars, work, HEADS, PAGE, LEAF, TILE, STAGES, 64)),
        ],
        [4, 1],
        [208, 40],
    )
    # fmt: on
