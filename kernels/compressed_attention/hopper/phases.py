"""The launches of compressed_attention for Hopper around `kernel`: one kernel in three phases.

WEIGHTS, VALUES    where a launch has few rows, in this order (`kernels.hopper.gathered.few`)
FOLD               behind `kernel`, where each piece of a list had a program of its own
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.compressed_attention.hopper.few_lists import count_in, read_list, rows_in
from kernels.compressed_attention.hopper.kernel import addresses_of, count_of
from kernels.hopper.gathered.few.values import attend_columns
from kernels.hopper.gathered.few.weights import weigh_keys
from kernels.hopper.gathered.fold import fold_pieces

WEIGHTS, VALUES, FOLD = (gl.constexpr(phase) for phase in range(3))


@gluon.jit
def work_in(
    q_ptr, keys, scratch, results, scale_log2, key_tiles, pieces,
    PHASE: gl.constexpr, PIECE: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr, GROUP: gl.constexpr,
    ARRIVALS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    if PHASE == WEIGHTS:
        weigh_keys(
            q_ptr, keys, scratch, scale_log2, key_tiles, read_list, count_in, rows_in, addresses_of, HEADS, 0, KEYS,
            ARRIVALS,
        )  # fmt: skip
    elif PHASE == VALUES:
        attend_columns(
            keys, scratch, results, key_tiles, pieces, read_list, count_in, rows_in, addresses_of, PIECE, HEADS, KEYS,
            GROUP, ARRIVALS, WARPS,
        )  # fmt: skip
    else:
        fold_pieces(keys, results, pieces, count_of, PIECE, HEADS)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(
    do_not_specialize=["key_tiles", "pieces", "stride_tables_seq", "stride_entry_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def attend_in_phases(
    q_ptr, pages_ptr, entry_pages_ptr, tables_ptr, entry_tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, sinks_ptr,
    out_ptr, weights_ptr, row_max_ptr, sums_ptr, acc_ptr, row_sum_ptr, arrivals_ptr,
    scale_log2, key_tiles, pieces, page_rows, entry_page_rows, stride_tables_seq, stride_entry_tables_seq,
    PHASE: gl.constexpr, PIECE: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr, K: gl.constexpr,
    HEADS: gl.constexpr, PAGE: gl.constexpr, OF_PAGE: gl.constexpr, KEYS: gl.constexpr, GROUP: gl.constexpr,
    ARRIVALS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    work_in(
        q_ptr,
        (
            (sequences_ptr, num_keys_ptr),
            (pages_ptr, tables_ptr, page_rows, stride_tables_seq, WINDOW, PAGE),
            (
                RATIO, entry_pages_ptr, entry_tables_ptr, entry_page_rows, stride_entry_tables_seq, chosen_ptr, K,
                OF_PAGE,
            ),
        ),
        (weights_ptr, row_max_ptr, sums_ptr, acc_ptr, row_sum_ptr, arrivals_ptr),
        (out_ptr, sinks_ptr, acc_ptr, row_max_ptr, row_sum_ptr), scale_log2, key_tiles, pieces, PHASE, PIECE, HEADS,
        KEYS, GROUP, ARRIVALS, WARPS,
    )  # fmt: skip
