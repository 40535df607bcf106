"""mla_decode in Gluon for Hopper: a tile of latents is loaded once and serves as keys and as values.

The arithmetic is a tree that follows from a sequence's own length (tiles of TILE latents, leaves as Tree says, sums of
two of these, and so on: see nodes.py), so its bits are the same whichever program computes which part.

    warps          work on a tile of 64 rows (query heads, tokens) and TILE latents
    producer       copies the latents, a page's rows at a time, and the queries
    even           of even tiles scores = q . latent over all 576 dimensions, and weights; values 0 .. 255 of all
    odd            of odd tiles the same; values 256 .. 511 of all
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.softmax import declare_looks
from kernels.mla_decode.hopper.even_leaves import attend_even
from kernels.mla_decode.hopper.leaves_stream import stream_leaves
from kernels.mla_decode.hopper.odd_leaves import attend_odd
from kernels.mla_decode.hopper.runs_barriers import init_latent_barriers, latent_barriers


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_latents(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    out_ptr,
    lse_ptr,
    parts_ptr,
    row_max_ptr,
    row_sum_ptr,
    nodes_ptr,
    stats_ptr,
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
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    declare_looks()
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HANDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * TILE, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], LAYOUT)
    handed = gl.allocate_shared_memory(gl.bfloat16, [64, TILE], HANDED)
    stats = gl.allocate_shared_memory(gl.float32, [3, 64], VECTOR)
    ends = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    halves, rope_bars = latent_barriers(STAGES)
    even_done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    odd_done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    end_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    end_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], VECTOR)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for s in gl.static_range(2):
        mbarrier.init(queue_full.index(s), count=1)
        mbarrier.init(queue_empty.index(s), count=2)
    work = (queue, queue_full, queue_empty)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(even_done, count=1)
    mbarrier.init(odd_done, count=1)
    mbarrier.init(end_full, count=1)
    mbarrier.init(end_empty, count=1)
    init_latent_barriers(halves, rope_bars, STAGES)
    plan = (items_ptr, counts_ptr, tables_ptr, drawn_ptr)
    results = (out_ptr, lse_ptr, parts_ptr, row_max_ptr, row_sum_ptr, nodes_ptr, stats_ptr)
    shared = ((q_left, q_right, q_rope, left, right, rope), (handed, stats, ends))
    bars = (
        (q_full, q_empty, halves[0], halves[1], halves[2], halves[3]),
        rope_bars,
        (even_done, odd_done, end_full, end_empty),
    )
    # fmt: off
    gl.warp_specialize(
        [
            (attend_even, (results, scale_log2, shared, bars, work,
                            HEADS, LEAF, SHORT, TILE, STAGES, MULTI, SLOT_ROWS)),
            (attend_odd, (results, scale_log2, num_tokens, shared, bars, work,
                            HEADS, LEAF, SHORT, TILE, STAGES, MULTI, SLOT_ROWS, WANTS_LSE)),
            (stream_leaves, (q_half_desc, q_rope_desc, half_desc, rope_desc, plan, page_rows, stride_tables_seq,
                            shared, bars, work, HEADS, PAGE, LEAF, SHORT, TILE, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )
    # fmt: on
