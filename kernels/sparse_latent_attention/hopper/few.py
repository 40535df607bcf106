"""sparse_latent_attention in Gluon for Hopper where rows are few: three phases of one kernel, a launch each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.few.scores import score_tile
from kernels.hopper.gathered.few.values import attend_columns
from kernels.hopper.gathered.few.weights import weigh_tile
from kernels.sparse_latent_attention.hopper.kernel import addresses_of, count_of


@gluon.jit
def list_from(keys, token, first, row):
    """A sequence's block table, and what the token chose: read before it is known how much, one wait for memory less.

    A token that sees no key may be of no sequence.
    """
    _, tables_ptr, sequences_ptr, _, chosen_ptr, _, stride_tables_seq, K, _ = keys
    sequence = gl.maximum(gl.load(sequences_ptr + token), 0)
    from_ptr = chosen_ptr + token.to(gl.int64) * K
    position = gl.load(from_ptr + gl.minimum(first + row, K - 1))
    return (
        tables_ptr + sequence.to(gl.int64) * stride_tables_seq,
        position,
        gl.load(from_ptr + gl.minimum(first, K - 1)),
    )


@gluon.jit
def rows_from(keys, of_token, first, stop, row):
    """The rows of the pool that these latents lie in; past the end it is the first one's, and masked."""
    _, _, _, _, _, page_rows, _, _, PAGE = keys
    table_ptr, position, first_position = of_token
    position = gl.where(first + row < stop, position, first_position)
    return gl.load(table_ptr + position // PAGE) * page_rows + position % PAGE


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["stride_tables_seq"], do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"])
def attend_in_phases(
    q_ptr, pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, out_ptr, scores_ptr, peaks_ptr, weights_ptr,
    decays_ptr, sums_ptr, tops_ptr, acc_ptr, row_sum_ptr, arrivals_ptr, scale_log2, page_rows, stride_tables_seq,
    PHASE: gl.constexpr, PIECE: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr,
    GROUP: gl.constexpr, ARRIVALS: gl.constexpr,
):  # fmt: skip
    KEY_TILES: gl.constexpr = (K + 63) // 64
    PIECES: gl.constexpr = (K + PIECE - 1) // PIECE
    BLOCK: gl.constexpr = PIECE // 64
    keys = (
        pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, page_rows, stride_tables_seq, K, PAGE,
    )  # fmt: skip
    scratch = (
        scores_ptr, peaks_ptr, weights_ptr, decays_ptr, sums_ptr, tops_ptr, acc_ptr, row_sum_ptr, arrivals_ptr,
    )  # fmt: skip
    if PHASE == 0:
        score_tile(
            q_ptr, keys, scratch, scale_log2, KEY_TILES, count_of, list_from, rows_from, addresses_of, HEADS, 64,
            ARRIVALS,
        )  # fmt: skip
    elif PHASE == 1:
        weigh_tile(keys, scratch, scale_log2, KEY_TILES, count_of, PIECE, BLOCK, HEADS)
    else:
        attend_columns(
            keys, scratch, (out_ptr, None), KEY_TILES, PIECES, count_of, list_from, rows_from, addresses_of, PIECE,
            BLOCK, HEADS, GROUP, ARRIVALS,
        )  # fmt: skip
