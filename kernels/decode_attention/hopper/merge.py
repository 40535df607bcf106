"""Partials in memory: where a pair's units lie, and the last program's fold over them.

A pair's units are folded as the tree says: leaves to their group first, groups in ascending order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_attention.hopper.quantized import value_dims
from kernels.decode_attention.hopper.tree import add_sink, fold, store_rows
from kernels.softmax.triton import NO_KEYS


@gluon.jit
def store_partial(
    partials, unit, row_max, row_sum, acc, column, ok, ROWS: gl.constexpr, PAIRED: gl.constexpr, LAYOUT: gl.constexpr
):
    """State [COLUMNS] and acc [D, COLUMNS] of one unit, of all pairs counted together."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    D: gl.constexpr = acc.shape[0]
    slot = unit.to(gl.int64) * ROWS
    d = value_dims(D, PAIRED, gl.SliceLayout(1, LAYOUT))
    gl.store(acc_ptr + slot * D + (column * D)[None, :] + d[:, None], acc, mask=ok[None, :])
    gl.store(row_max_ptr + slot + column, row_max, mask=ok)
    gl.store(row_sum_ptr + slot + column, row_sum, mask=ok)


@gluon.jit
def load_partial(partials, unit, row, ok, at, ROWS: gl.constexpr, D: gl.constexpr):
    """The state of a unit, past the first cache: another program has written it. Nothing where it is not `ok`."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    slot = unit.to(gl.int64) * ROWS
    row_max = gl.load(row_max_ptr + slot + row, mask=ok, other=NO_KEYS, cache_modifier=".cg")
    row_sum = gl.load(row_sum_ptr + slot + row, mask=ok, other=0.0, cache_modifier=".cg")
    acc = gl.load(acc_ptr + slot * D + at, mask=ok[:, None], other=0.0, cache_modifier=".cg")
    return row_max, row_sum, acc


@gluon.jit
def fold_four(a, b, c, d):
    """Four states in ascending order."""
    row_max, row_sum, acc = fold(a[0], a[1], a[2], b[0], b[1], b[2], 1)
    row_max, row_sum, acc = fold(row_max, row_sum, acc, c[0], c[1], c[2], 1)
    return fold(row_max, row_sum, acc, d[0], d[1], d[2], 1)


@gluon.jit
def merge_rows(
    partials,
    first,
    skipped,
    units,
    leaves_per_unit,
    row,
    ok,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """State of a block of rows over units skipped..units - 1 of a pair whose unit 0 has the number `first`.

    Eight partials are in flight at a time; a group's leaves begin at a multiple of four, so neither four straddles one.
    """
    BLOCK: gl.constexpr = row.shape[0]
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    at = (row * D)[:, None] + d[None, :]
    row_max = gl.full([BLOCK], NO_KEYS, gl.float32, gl.SliceLayout(1, LAYOUT))
    row_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([BLOCK, D], gl.float32, LAYOUT)
    for unit in range(skipped // 8 * 8, units, 8):
        s0 = load_partial(partials, first + unit, row, ok & (unit >= skipped), at, ROWS, D)
        s1 = load_partial(partials, first + unit + 1, row, ok & (unit + 1 >= skipped) & (unit + 1 < units), at, ROWS, D)
        s2 = load_partial(partials, first + unit + 2, row, ok & (unit + 2 >= skipped) & (unit + 2 < units), at, ROWS, D)
        s3 = load_partial(partials, first + unit + 3, row, ok & (unit + 3 >= skipped) & (unit + 3 < units), at, ROWS, D)
        s4 = load_partial(partials, first + unit + 4, row, ok & (unit + 4 >= skipped) & (unit + 4 < units), at, ROWS, D)
        s5 = load_partial(partials, first + unit + 5, row, ok & (unit + 5 >= skipped) & (unit + 5 < units), at, ROWS, D)
        s6 = load_partial(partials, first + unit + 6, row, ok & (unit + 6 >= skipped) & (unit + 6 < units), at, ROWS, D)
        s7 = load_partial(partials, first + unit + 7, row, ok & (unit + 7 >= skipped) & (unit + 7 < units), at, ROWS, D)
        if leaves_per_unit == 1:
            p, t, a = fold_four(s0, s1, s2, s3)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, p, t, a, 1)
            p, t, a = fold_four(s4, s5, s6, s7)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, p, t, a, 1)
        else:
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s0[0], s0[1], s0[2], 1)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s1[0], s1[1], s1[2], 1)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s2[0], s2[1], s2[2], 1)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s3[0], s3[1], s3[2], 1)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s4[0], s4[1], s4[2], 1)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s5[0], s5[1], s5[2], 1)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s6[0], s6[1], s6[2], 1)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, s7[0], s7[1], s7[2], 1)
    return row_max, row_sum, acc


@gluon.jit
def merge_pair(
    partials,
    first,
    skipped,
    units,
    leaves_per_unit,
    rows,
    head,
    token_row,
    outputs,
    strides,
    value_scale,
    has_keys,
    ROWS: gl.constexpr,
    GQA_GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Merges all rows of a pair, BLOCK rows at a time, and writes the outputs."""
    out_ptr, lse_ptr, sinks_ptr = outputs
    stride_out_token, stride_out_head, num_tokens = strides
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16] if D == 64 else [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for block in range(0, rows, BLOCK):
        row = block + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
        ok = row < rows
        row_max, row_sum, acc = merge_rows(partials, first, skipped, units, leaves_per_unit, row, ok, ROWS, D, LAYOUT)
        q_head = head * GQA_GROUP + row % GQA_GROUP
        if HAS_SINKS:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sinks_ptr, q_head, ok & has_keys, 1)
        token = token_row + row // GQA_GROUP
        at = (token * stride_out_token + q_head * stride_out_head)[:, None] + d[None, :]
        lse_at = lse_ptr + q_head.to(gl.int64) * num_tokens + token
        store_rows(row_max, row_sum, acc, out_ptr + at, lse_at, value_scale, ok, 1, WANTS_LSE)
