"""compressed_attention in Gluon for Hopper: attention over lists of gathered keys, a window's tokens and then entries.

list       0 ............. in window | 0 ....... entries (all that are seen, or the chosen)
tiles      |  64   |  64   |  64   |  64   |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.hopper.gathered.attention import attend_lists


@gluon.jit
def count_of(keys, token):
    """Returns how many keys a token's list has."""
    return count_in_list(keys, gl.load(keys[0][1] + token))


@gluon.jit
def count_in_list(keys, num_keys):
    """The same, of a token that sees num_keys."""
    count = gl.minimum(num_keys, keys[1][4])
    if keys[2][0]:
        seen = num_keys // keys[2][0]
        if keys[2][6]:
            seen = gl.minimum(seen, keys[2][6])
        count += seen
    return count


@gluon.jit
def list_of(keys, token):
    """The token, its sequence, the position of the first key in its window, and how many there are."""
    num_keys = gl.load(keys[0][1] + token)
    in_window = gl.minimum(num_keys, keys[1][4])
    return token.to(gl.int64), gl.load(keys[0][0] + token).to(gl.int64), num_keys - in_window, in_window


@gluon.jit
def rows_of(keys, of_token, first, stop, row):
    """Returns the rows of the pools that a tile's keys lie in, as `rows_at` numbers them."""
    token, _, _, in_window = of_token
    key = gl.minimum(first + row, stop - 1)
    entry = gl.maximum(key - in_window, 0)
    if keys[2][6]:
        entry = gl.load(keys[2][5] + token * keys[2][6] + entry, mask=key >= in_window, other=0)
    return rows_at(keys, of_token, key, entry)


@gluon.jit
def rows_at(keys, of_token, key, entry):
    """Returns the rows of the pools that keys of a list lie in, of an entry its bits inverted: a tile may hold both.

    `entry` is the entry that a key behind the window stands for.
    """
    _, sequence, begin, in_window = of_token
    _, tables_ptr, page_rows, stride_tables_seq, _, PAGE = keys[1]
    place = begin + key
    at = tables_ptr + sequence * stride_tables_seq + place // PAGE
    rows = place % PAGE
    if not keys[2][0]:
        rows += gl.load(at) * page_rows
    else:
        _, _, entry_tables_ptr, entry_page_rows, stride_entry_tables_seq, _, _, OF_PAGE = keys[2]
        is_entry = key >= in_window
        entry_at = entry_tables_ptr + sequence * stride_entry_tables_seq + entry // OF_PAGE
        page = gl.load(gl.where(is_entry, entry_at, at))
        rows = gl.where(is_entry, ~(page * entry_page_rows + entry % OF_PAGE), page * page_rows + rows)
    return rows


@gluon.jit
def addresses_of(keys, rows):
    """Returns pointers to rows of the pools, as `rows_at` numbers them."""
    at = keys[1][0] + rows.to(gl.int64) * 512
    if keys[2][0]:
        at = gl.where(rows < 0, keys[2][1] + (~rows).to(gl.int64) * 512, at)
    return at


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(
    do_not_specialize=["items", "pieces", "stride_tables_seq", "stride_entry_tables_seq"],
    do_not_specialize_on_alignment=["sequences_ptr", "num_keys_ptr"],
)
def attend_window_and_entries(
    q_desc, pages_ptr, entry_pages_ptr, tables_ptr, entry_tables_ptr, sequences_ptr, num_keys_ptr, chosen_ptr,
    sinks_ptr, out_ptr, acc_ptr, row_max_ptr, row_sum_ptr, scale_log2, items, pieces, page_rows, entry_page_rows,
    stride_tables_seq, stride_entry_tables_seq,
    SPLITS: gl.constexpr, PIECE: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr, K: gl.constexpr,
    HEADS: gl.constexpr, PAGE: gl.constexpr, OF_PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """K is 0 where all entries that are seen are read: then there is no choice, and where RATIO is 0 nothing of
    entries."""
    attend_lists(
        (q_desc, None),
        (
            (sequences_ptr, num_keys_ptr),
            (pages_ptr, tables_ptr, page_rows, stride_tables_seq, WINDOW, PAGE),
            (
                RATIO, entry_pages_ptr, entry_tables_ptr, entry_page_rows, stride_entry_tables_seq, chosen_ptr, K,
                OF_PAGE,
            ),
        ),
        (out_ptr, sinks_ptr, acc_ptr, row_max_ptr, row_sum_ptr), scale_log2, items, count_of, list_of, rows_of,
        addresses_of, SPLITS, pieces, PIECE, HEADS, 0, STAGES,
    )  # fmt: skip
