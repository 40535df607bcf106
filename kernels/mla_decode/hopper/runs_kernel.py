"""mla_decode cut by load, in Gluon for Hopper: a tile of latents is loaded once and serves as keys and as values.

Each program has one run of tiles, as long as every other's. Where a run's end cuts a sequence, its parts are folded by
all programs together at the end or by another launch, as the plan says; so a result's bits depend on the batch.

    warps          work on a tile of 64 rows (query heads, tokens) and TILE latents
    producer       copies the latents, a page's rows at a time, and the queries
    even           of even tiles scores = q . latent over all 576 dimensions, and softmax; values 0 .. 255 of all
    odd            of odd tiles the same; values 256 .. 511 of all
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.softmax import declare_looks
from kernels.mla_decode.hopper.even_consumer import attend_even
from kernels.mla_decode.hopper.odd_consumer import attend_odd
from kernels.mla_decode.hopper.runs_stream import stream_runs
from kernels.mla_decode.hopper.shared import make_shared


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_runs(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    out_ptr,
    lse_ptr,
    parts_ptr,
    levels_ptr,
    items_ptr,
    firsts_ptr,
    counts_ptr,
    shared_ptr,
    arrivals_ptr,
    tables_ptr,
    scale_log2,
    num_tokens,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    TOGETHER: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    declare_looks()
    shared, bars, work = make_shared(TILE, STAGES)
    plan = (items_ptr, firsts_ptr, tables_ptr)
    results = (out_ptr, lse_ptr, parts_ptr, levels_ptr)
    together = (arrivals_ptr, counts_ptr, shared_ptr)
    # fmt: off
    gl.warp_specialize(
        [
            (attend_even, (results, together, scale_log2, shared, bars, work,
                            HEADS, TILE, STAGES, MULTI, SLOT_ROWS, TOGETHER)),
            (attend_odd, (results, together, scale_log2, num_tokens, shared, bars, work,
                            HEADS, TILE, STAGES, MULTI, SLOT_ROWS, TOGETHER, WANTS_LSE)),
            (stream_runs, (q_half_desc, q_rope_desc, half_desc, rope_desc, plan, page_rows, stride_tables_seq,
                            shared, bars, work, HEADS, PAGE, TILE, STAGES, 64)),
        ],
        [4, 1],
        [232, 40],
    )
    # fmt: on
