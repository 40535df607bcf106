"""mla_decode cut by load, in Gluon for Hopper, where heads are few and each sequence has one query.

It is cut as for many heads, see runs_kernel.py. Where no sequence has many parts, the program with the first one adds
the others as if they were latents; else all programs fold all parts together. Programs begin one by one while the
launch before ends, ask for their first latents (few_early.py), and wait for that before they read anything else or
write. They need not be on the card at once: programs begin in order, one that adds parts waits for those behind it, of
which all but the last one on the card end, and those that meet wait no longer than need be.

    producer       latents, a page's rows at a time, in step with other programs' (few_pace.py), and the queries; parts
                   that the program adds
    pacer          the second tile of latents, while the launch before still runs
    consumer       everything else, for up to 32 heads
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.launches import allow_next_launch
from kernels.mla_decode.hopper.few_early import ask_second_tile, early_buffers
from kernels.mla_decode.hopper.few_runs_consumer import attend_few_run
from kernels.mla_decode.hopper.few_runs_stream import stream_few_runs
from kernels.mla_decode.hopper.runs_barriers import init_latent_barriers, latent_barriers


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_few_runs(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    parts_desc,
    out_ptr,
    lse_ptr,
    parts_ptr,
    levels_ptr,
    items_ptr,
    firsts_ptr,
    counts_ptr,
    shared_ptr,
    arrivals_ptr,
    stored_ptr,
    tables_ptr,
    scale_log2,
    num_tokens,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    TOGETHER: gl.constexpr,
    EARLY: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    if TOGETHER:  # a fold behind would take room while programs have yet to end
        allow_next_launch()
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HANDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], LAYOUT)
    handed = gl.allocate_shared_memory(gl.bfloat16, [TILE, ROWS], HANDED)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    halves, rope_bars = latent_barriers(STAGES)
    early = early_buffers()
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], VECTOR)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for s in gl.static_range(2):
        mbarrier.init(queue_full.index(s), count=1)
        mbarrier.init(queue_empty.index(s), count=1)
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=1)
    work = (queue, queue_full, queue_empty)
    init_latent_barriers(halves, rope_bars, STAGES)
    plan = (items_ptr, firsts_ptr, tables_ptr, parts_desc, stored_ptr, counts_ptr, arrivals_ptr + 3)
    results = (out_ptr, lse_ptr, parts_ptr, levels_ptr)
    together = (arrivals_ptr, counts_ptr, shared_ptr)
    shared = ((q_left, q_right, q_rope, left, right, rope), handed)
    bars = (
        (q_full, q_empty, halves[0], halves[1], halves[2], halves[3]),
        rope_bars,
    )
    # fmt: off
    gl.warp_specialize(
        [
            (attend_few_run, (results, together, stored_ptr, scale_log2, num_tokens, shared, bars, work,
                               HEADS, TILE, STAGES, ROWS, SLOT_ROWS, TOGETHER, WANTS_LSE)),
            (stream_few_runs, (q_half_desc, q_rope_desc, half_desc, rope_desc, plan, num_tokens, page_rows,
                                stride_tables_seq, shared, bars, early, work, HEADS, PAGE, TILE, STAGES, ROWS, EARLY)),
            (ask_second_tile, (half_desc, rope_desc, (left, right, rope), early, PAGE, TILE, EARLY)),
        ],
        [1, 1],
        [56, 56],
    )
    # fmt: on
