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

from kernels.hopper.softmax import declare_looks
from kernels.mla_decode.hopper.even_leaves import attend_even
from kernels.mla_decode.hopper.leaves_stream import stream_leaves
from kernels.mla_decode.hopper.odd_leaves import attend_odd
from kernels.mla_decode.hopper.shared import make_shared


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
    shared, bars, work = make_shared(TILE, STAGES)
    plan = (items_ptr, counts_ptr, tables_ptr, drawn_ptr)
    results = (out_ptr, lse_ptr, parts_ptr, row_max_ptr, row_sum_ptr, nodes_ptr, stats_ptr)
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
