"""mla_decode in Gluon for Hopper where heads are few and each sequence has one query: bound by memory alone.

A sequence's sums are those of its plan's tree, whichever program computes which part.

    producer       latents, a page's rows at a time, and the queries, as for many heads
    consumer       everything else, for up to 16 heads
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.mla_decode.hopper.few_consumer import attend_few
from kernels.mla_decode.hopper.stream import stream


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_latents_few(
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
    drawn_ptr,
    tables_ptr,
    scale_log2,
    num_tokens,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    SHORT: gl.constexpr,
    LEAVES_PER_GROUP: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HANDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(gl.bfloat16, [16, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [16, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [16, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], LAYOUT)
    handed = gl.allocate_shared_memory(gl.bfloat16, [TILE, 16], HANDED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    left_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for s in gl.static_range(2):
        mbarrier.init(queue_full.index(s), count=1)
        mbarrier.init(queue_empty.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(left_full.index(s), count=1)
        mbarrier.init(left_empty.index(s), count=1)
        mbarrier.init(right_full.index(s), count=1)
        mbarrier.init(right_empty.index(s), count=1)
    plan = (items_ptr, counts_ptr, tables_ptr, drawn_ptr)
    results = (out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr, sum_ptr)
    tiles = (q_left, q_right, q_rope, left, right, rope)
    ring = (q_full, q_empty, left_full, left_empty, right_full, right_empty)
    work = (queue, queue_full, queue_empty)
    # fmt: off
    gl.warp_specialize(
        [
            (attend_few, (results, scale_log2, num_tokens, (tiles, handed), ring, work,
                          HEADS, LEAF, SHORT, LEAVES_PER_GROUP, TILE, STAGES, WANTS_LSE)),
            (stream, (q_half_desc, q_rope_desc, half_desc, rope_desc, plan, page_rows, stride_tables_seq,
                      (tiles,), (ring,), work, HEADS, PAGE, LEAF, SHORT, TILE, STAGES, 16)),
        ],
        [1],
        [56],
    )
    # fmt: on
