"""Shared by the phases for few rows: which 64 rows a program has, and copies of queries and pages to shared memory.

A program has one warp for each scheduler, so each instruction of an address shows: rows are 32-bit numbers, widths
constants, and what lies behind the last key is that key's row, not a masked one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

# Keys of a tile, as `attend_tiles` has for heads of up to 128.
KEYS = gl.constexpr(128)


@gluon.jit
def half_tile(records_ptr, number, half, GQA_GROUP: gl.constexpr):
    """(sequence, first query, first token, queries and keys of the sequence, key tiles) of half a tile of the plan.

    Rows that do not exist have no key tiles.
    """
    at = records_ptr + number * 8
    seq, first, token = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    q_len, kv_len = gl.load(at + 3), gl.load(at + 4)
    first = first + half * (64 // GQA_GROUP)
    return seq, first, token, q_len, kv_len, key_tiles(first, q_len, kv_len, GQA_GROUP)


@gluon.jit
def prefetch_records(records_ptr):
    """Asks for the first records of the plan to come into the first-level cache: 16 of them, 512 bytes."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = (records_ptr + gl.arange(0, 4, L) * 32).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def key_tiles(first, q_len, kv_len, GQA_GROUP: gl.constexpr):
    """Returns how many tiles of keys the 64 rows from query `first` on see; 0 where they do not exist."""
    stop = gl.minimum(kv_len, kv_len - q_len + first + 64 // GQA_GROUP)
    return gl.where(first < q_len, (stop + KEYS - 1) // KEYS, 0)


@gluon.jit
def copy_queries(target, queries, head, first, token, q_len, GQA_GROUP: gl.constexpr, D: gl.constexpr):
    """Begins to copy 64 rows of queries; rows that do not exist are like the last one. Strides count 8 elements."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q_ptr, stride_token, stride_group, stride_head = queries
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    query = gl.minimum(first + row // GQA_GROUP, q_len - 1)
    at = (token + query).to(gl.int64) * stride_token + head.to(gl.int64) * stride_group + row % GQA_GROUP * stride_head
    from_ptr = q_ptr + (at * 8)[:, None] + gl.arange(0, D, gl.SliceLayout(0, L))[None, :]
    async_copy.async_copy_global_to_shared(target, from_ptr)


@gluon.jit
def page_row(table_ptr, key, kv_len, page_rows, PAGE: gl.constexpr):
    """Returns keys' rows in a pool, those of head 0 where each head has its own; behind the last key its row."""
    key = gl.minimum(key, kv_len - 1).to(gl.uint32)
    return gl.load(table_ptr + key // PAGE) * page_rows + (key % PAGE).to(gl.int32)


@gluon.jit
def head_ptr(pages_ptr, head, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr):
    """Returns where row 0 of a head lies, rows as `page_row` numbers them."""
    return pages_ptr + (head * (PAGE * D) if HND else head * D)


@gluon.jit
def copy_rows(target, from_ptr, rows, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """Begins to copy COLUMNS columns of rows of WIDTH elements."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(target, from_ptr + (rows.to(gl.int64) * WIDTH)[:, None] + column[None, :])


@gluon.jit
def copy_tile(
    target, pages, table_ptr, tile, kv_len, head,
    HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
):  # fmt: skip
    """Begins to copy a tile's keys or values."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L))
    rows = page_row(table_ptr, key, kv_len, pages[1], PAGE)
    copy_rows(target, head_ptr(pages[0], head, D, PAGE, HND), rows, D if HND else HEADS * D, D)


@gluon.jit
def ask_for_rows(
    pages, table_ptr, tile, kv_len, head,
    HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
):  # fmt: skip
    """Asks for a tile's values, which a later phase reads, to come into L2."""
    LINES: gl.constexpr = D // 64
    WIDTH: gl.constexpr = D if HND else HEADS * D
    L: gl.constexpr = gl.BlockedLayout([1, LINES], [32, 1], [4, 1], [1, 0])
    key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L))
    at = page_row(table_ptr, key, kv_len, pages[1], PAGE).to(gl.int64) * WIDTH
    lines = (
        head_ptr(pages[0], head, D, PAGE, HND) + at[:, None] + 64 * gl.arange(0, LINES, gl.SliceLayout(0, L))[None, :]
    )
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines.to(gl.int64, bitcast=True)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
