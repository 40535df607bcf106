"""sparse_latent_attention in Gluon for Hopper: attention over lists of gathered keys, which are chosen latents."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.attention import attend_lists


@gluon.jit
def count_of(keys, token):
    """Returns how many latents a token has chosen."""
    _, _, _, num_keys_ptr, _, _, _, K, _ = keys
    return gl.minimum(gl.load(num_keys_ptr + token), K)


@gluon.jit
def list_of(keys, token):
    """A sequence's block table and what the token chose."""
    _, tables_ptr, sequences_ptr, _, chosen_ptr, _, stride_tables_seq, K, _ = keys
    table_ptr = tables_ptr + gl.load(sequences_ptr + token).to(gl.int64) * stride_tables_seq
    return table_ptr, chosen_ptr + token.to(gl.int64) * K


@gluon.jit
def rows_of(keys, of_token, first, stop, row):
    """The rows of the pool that a tile's latents lie in; past the end it is the last one's, and masked."""
    _, _, _, _, _, page_rows, _, _, PAGE = keys
    table_ptr, from_ptr = of_token
    position = gl.load(from_ptr + gl.minimum(first + row, stop - 1))
    return gl.load(table_ptr + position // PAGE) * page_rows + position % PAGE


@gluon.jit
def addresses_of(keys, rows):
    """Returns pointers to rows of the pool."""
    return keys[0] + rows.to(gl.int64) * 576


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(
    do_not_specialize=["items", "stride_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def attend_gathered(
    q_half_desc, q_rope_desc, pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, out_ptr, acc_ptr,
    row_max_ptr, row_sum_ptr, scale_log2, items, page_rows, stride_tables_seq,
    SPLITS: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    keys = (
        pages_ptr, tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr, page_rows, stride_tables_seq, K, PAGE,
    )  # fmt: skip
    attend_lists(
        (q_half_desc, q_rope_desc), keys, (out_ptr, None, acc_ptr, row_max_ptr, row_sum_ptr), scale_log2, items,
        count_of, list_of, rows_of, addresses_of, SPLITS, PIECES, PIECE, HEADS, 64, STAGES,
    )  # fmt: skip
