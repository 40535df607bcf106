"""Partials in memory: where groups and leaves wait, and the last program's fold over those of a pair.

Knows no key. A group that lies in one chunk waits as a whole; of a group that a chunk's end cuts, each leaf waits by
itself, in a place of its chunk's. Both ends of the wait compute the place from the plan's sizes.

    slots     | chunk 0: leaves in front, leaves behind | chunk 1 ... | pair 0: group 0, group 1, ... | pair 1 ...
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_attention.hopper.pieces import chunk_of
from kernels.decode_attention.hopper.tree import NOTHING, add_sink, fold, store_rows


@gluon.jit
def cut_slot(chunk, leaf, begins):
    """Slot of a leaf whose group is cut; `begins` says that the group begins in this chunk and is continued behind."""
    return chunk * 8 + gl.where(begins, 4, 0) + leaf % 4


@gluon.jit
def store_partial(partials, slot, peak, total, acc, column, ok, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """State [COLUMNS] and acc [D, COLUMNS]."""
    acc_ptr, peak_ptr, total_ptr, _ = partials
    D: gl.constexpr = acc.shape[0]
    at = slot.to(gl.int64) * ROWS
    d = gl.arange(0, D, gl.SliceLayout(1, LAYOUT))
    gl.store(acc_ptr + at * D + (column * D)[None, :] + d[:, None], acc, mask=ok[None, :])
    gl.store(peak_ptr + at + column, peak, mask=ok)
    gl.store(total_ptr + at + column, total, mask=ok)


@gluon.jit
def load_partial(partials, slot, row, ok, D: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """State [BLOCK] and acc [BLOCK, D], past the first cache. Nothing where it is not `ok`."""
    acc_ptr, peak_ptr, total_ptr, _ = partials
    at = slot.to(gl.int64) * ROWS
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    peak = gl.load(peak_ptr + at + row, mask=ok, other=NOTHING, cache_modifier=".cg")
    total = gl.load(total_ptr + at + row, mask=ok, other=0.0, cache_modifier=".cg")
    where = acc_ptr + at * D + (row * D)[:, None] + d[None, :]
    acc = gl.load(where, mask=ok[:, None], other=0.0, cache_modifier=".cg")
    return peak, total, acc


@gluon.jit
def load_group(partials, pair, sizes, group, row, ok, D: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Four states whose fold is a group's: its leaves, or itself and three of nothing; all nothing behind the end."""
    first_leaf, first_group, skipped, leaves = pair
    low = gl.maximum(group * 4, skipped)
    high = gl.minimum(group * 4 + 4, leaves)
    begin = chunk_of(first_leaf + low, sizes)
    whole = begin == chunk_of(first_leaf + high - 1, sizes)
    group_slot = partials[3] + first_group + group
    leaf = group * 4
    chunk = chunk_of(first_leaf + leaf, sizes)
    slot = gl.where(whole, group_slot, cut_slot(chunk, leaf, chunk == begin))
    a = load_partial(partials, slot, row, ok & (low < high) & (whole | (leaf >= low)), D, ROWS, LAYOUT)
    ok = ok & (begin < chunk_of(first_leaf + high - 1, sizes))
    leaf = group * 4 + 1
    chunk = chunk_of(first_leaf + leaf, sizes)
    b = load_partial(
        partials, cut_slot(chunk, leaf, chunk == begin), row, ok & (leaf >= low) & (leaf < high), D, ROWS, LAYOUT
    )
    leaf = group * 4 + 2
    chunk = chunk_of(first_leaf + leaf, sizes)
    c = load_partial(
        partials, cut_slot(chunk, leaf, chunk == begin), row, ok & (leaf >= low) & (leaf < high), D, ROWS, LAYOUT
    )
    leaf = group * 4 + 3
    chunk = chunk_of(first_leaf + leaf, sizes)
    d = load_partial(
        partials, cut_slot(chunk, leaf, chunk == begin), row, ok & (leaf >= low) & (leaf < high), D, ROWS, LAYOUT
    )
    return a, b, c, d


@gluon.jit
def fold_group(peak, total, acc, states):
    """A running state and, behind it, one group's four states, which are folded among themselves before."""
    a, b, c, d = states
    p, t, x = fold(a[0], a[1], a[2], b[0], b[1], b[2], 1)
    p, t, x = fold(p, t, x, c[0], c[1], c[2], 1)
    p, t, x = fold(p, t, x, d[0], d[1], d[2], 1)
    return fold(peak, total, acc, p, t, x, 1)


@gluon.jit
def merge_rows(partials, pair, sizes, row, ok, D: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """State of a block of rows over all of a pair's groups; four groups are on their way at a time."""
    BLOCK: gl.constexpr = row.shape[0]
    peak = gl.full([BLOCK], NOTHING, gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([BLOCK, D], gl.float32, LAYOUT)
    for group in range(pair[2] // 4, (pair[3] + 3) // 4, 4):
        s0 = load_group(partials, pair, sizes, group, row, ok, D, ROWS, LAYOUT)
        s1 = load_group(partials, pair, sizes, group + 1, row, ok, D, ROWS, LAYOUT)
        s2 = load_group(partials, pair, sizes, group + 2, row, ok, D, ROWS, LAYOUT)
        s3 = load_group(partials, pair, sizes, group + 3, row, ok, D, ROWS, LAYOUT)
        peak, total, acc = fold_group(peak, total, acc, s0)
        peak, total, acc = fold_group(peak, total, acc, s1)
        peak, total, acc = fold_group(peak, total, acc, s2)
        peak, total, acc = fold_group(peak, total, acc, s3)
    return peak, total, acc


@gluon.jit
def merge_pair(
    partials,
    pair,
    sizes,
    rows,
    head,
    token_row,
    outputs,
    strides,
    value_scale,
    has_keys,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Merges all rows of a pair, BLOCK rows at a time, and writes what they end as."""
    out_ptr, lse_ptr, sinks_ptr = outputs
    stride_out_token, stride_out_head, num_tokens = strides
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for block in range(0, rows, BLOCK):
        row = block + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
        ok = row < rows
        peak, total, acc = merge_rows(partials, pair, sizes, row, ok, D, ROWS, LAYOUT)
        q_head = head * GROUP + row % GROUP
        if HAS_SINKS:
            peak, total, acc = add_sink(peak, total, acc, sinks_ptr, q_head, ok & has_keys, 1)
        token = token_row + row // GROUP
        at = (token * stride_out_token + q_head * stride_out_head)[:, None] + d[None, :]
        lse_at = lse_ptr + q_head.to(gl.int64) * num_tokens + token
        store_rows(peak, total, acc, out_ptr + at, lse_at, value_scale, ok, 1, WANTS_LSE)
