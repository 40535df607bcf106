"""The launches of sparse_latent_attention for Hopper around `kernel`: one kernel in three phases.

WEIGHTS, VALUES    where a launch has few rows, in this order (`kernels.hopper.gathered.few`)
FOLD               behind `kernel`, where each piece of a choice had a program of its own
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.few.values import attend_columns
from kernels.hopper.gathered.few.weights import weigh_keys
from kernels.hopper.gathered.fold import fold_pieces
from kernels.sparse_latent_attention.hopper.kernel import addresses_of, count_of

WEIGHTS, VALUES, FOLD = (gl.constexpr(phase) for phase in range(3))


@gluon.jit
def read_list(keys, token, first, row):
    """A sequence's block table, how many keys a token sees, and what it chose: read before it is known how much, one
    wait for memory less.

    A token that sees no key may be of no sequence.
    """
    _, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, _, stride_tables_seq, K, _ = keys
    sequence = gl.maximum(gl.load(sequences_ptr + token), 0)
    from_ptr = chosen_ptr + token.to(gl.int64) * K
    return (
        tables_ptr + sequence.to(gl.int64) * stride_tables_seq,
        gl.load(num_keys_ptr + token),
        gl.load(from_ptr + gl.minimum(first + row, K - 1)),
        gl.load(from_ptr),
    )


@gluon.jit
def count_in(keys, read):
    """Returns how many latents the token has chosen."""
    return gl.minimum(read[1], keys[7])


@gluon.jit
def rows_in(keys, read, first, stop, row):
    """Returns the rows of the pool that these latents lie in; past the end it is the first one's, and masked."""
    table_ptr, _, position, first_position = read
    position = gl.where(first + row < stop, position, first_position)
    return gl.load(table_ptr + position // keys[8]) * keys[5] + position % keys[8]


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["stride_tables_seq"], do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"])
def attend_in_phases(
    q_ptr, pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, out_ptr, weights_ptr, tops_ptr,
    sums_ptr, acc_ptr, row_sum_ptr, arrivals_ptr, scale_log2, page_rows, stride_tables_seq,
    PHASE: gl.constexpr, PIECE: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, GROUP: gl.constexpr, ARRIVALS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    KEY_TILES: gl.constexpr = (K + 63) // 64
    PIECES: gl.constexpr = (K + PIECE - 1) // PIECE
    keys = (
        pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, page_rows, stride_tables_seq, K, PAGE,
    )  # fmt: skip
    scratch = weights_ptr, tops_ptr, sums_ptr, acc_ptr, row_sum_ptr, arrivals_ptr
    if PHASE == WEIGHTS:
        weigh_keys(
            q_ptr, keys, scratch, scale_log2, KEY_TILES, read_list, count_in, rows_in, addresses_of, HEADS, 64, KEYS,
            ARRIVALS,
        )  # fmt: skip
    elif PHASE == VALUES:
        attend_columns(
            keys, scratch, (out_ptr, None), KEY_TILES, PIECES, read_list, count_in, rows_in, addresses_of, PIECE, HEADS,
            KEYS, GROUP, ARRIVALS, WARPS,
        )  # fmt: skip
    else:
        fold_pieces(keys, (out_ptr, None, acc_ptr, tops_ptr, row_sum_ptr), PIECES, count_of, PIECE, HEADS)
