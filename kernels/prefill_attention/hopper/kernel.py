"""prefill_attention in Gluon for Hopper: one producer warp, two consumer warpgroups, a persistent list of tiles.

Key tiles start at absolute multiples of BN, every tile passes through one loop body, and a tile that a row does not see
leaves that row's state bit for bit as it was: so a token's result does not depend on how its prompt was cut, on its
place in the tile or on other requests.

    producer     Q of the next tile; K, V of key tile i: one TMA box for each page, into rows of one wgmma operand
    consumers    64 rows each:   QK(i) and PV(i - 1) run on the tensor cores, while softmax(i - 1) becomes softmax(i)

    rows of a tile: 128 // GQA_GROUP queries, each with its GQA_GROUP query heads, so that they share the tile's keys
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.softmax import declare_looks
from kernels.prefill_attention.hopper.consumer import consume
from kernels.prefill_attention.hopper.producer import produce, widen
from kernels.prefill_attention.hopper.shared import make_shared


@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_tiles(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, sinks_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, records_ptr, count_ptr,
    scale_log2, cap_log2, num_tokens, stride_tables_seq, stride_out_token, stride_out_head, k_page_rows, v_page_rows,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    HND: gl.constexpr, PACKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, SCALES: gl.constexpr,
    Q_REGISTERS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Allocates what producer and consumers share, and starts them."""
    rows, arriving, bars, in_bars, queue = make_shared(
        q_desc, k_desc, v_desc, GQA_GROUP, DIM, D, PACKED, BN, STAGES, SCALES, 6
    )
    qs, ks, vs = rows
    q_in, k_in, v_in, k_quantized, v_quantized = arriving
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    k_in_full, k_in_empty, v_in_full, v_in_empty = in_bars
    declare_looks()
    # One expression: what passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (consume, (
                out_ptr, lse_ptr, sinks_ptr, k_scales_ptr, v_scales_ptr, scale_log2, cap_log2, num_tokens,
                stride_out_token, stride_out_head, qs, ks, vs, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                gl.constexpr(role), GQA_GROUP, DIM, D, WINDOW, CAP, BN, STAGES, WANTS_LSE, HAS_SINKS, SCALES,
                Q_REGISTERS, HALVES,
            ))
            if role < 2
            else (widen, (
                queue, q_full, q_empty, k_quantized, v_quantized, k_in_full, k_in_empty, v_in_full, v_in_empty,
                ks, vs, k_full, k_empty, v_full, v_empty, GQA_GROUP, WINDOW, BN, STAGES, HALVES,
            ))
            if role == 2
            else (produce, (
                q_desc, k_desc, v_desc, tables_ptr, stride_tables_seq, records_ptr, count_ptr, num_tokens,
                k_page_rows, v_page_rows, q_in, k_in, v_in, queue, q_full, q_empty,
                k_in_full, k_in_empty, v_in_full, v_in_empty,
                HEADS, GQA_GROUP, D, PAGE, HND, PACKED, DIM < D, WINDOW, BN, STAGES, HALVES,
            ))
            for role in ((0, 1, 2, 3) if SCALES else (0, 1, 3))
        ],
        [4, 4, 1] if SCALES else [4, 1],
        [208, 40, 48] if SCALES else [224, 56] if PAGE < 16 else [232, 40] if DIM < D or D > 128 else [240, 32],
    )  # fmt: skip
