"""Partials in memory: where those of a pair lie, and the last program's fold over them.

A pair's groups come first, those from its origin on: what one split holds of a group from its beginning is one partial.
The leaves of a group that lie behind a cut follow, split by split, one partial each. They are folded as the tree says:
leaves to their group first, groups in ascending order. A pair that is cut at groups has one partial for each.

    groups     | 0       | 1       | 2       |        cut before leaf 6: leaves 4 and 5 are the partial of group 1,
    leaves     | 0 1 2 3 | 4 5|6 7 | 8 9 10  |        6 and 7 have one each
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.decode_attention.hopper.quantized import value_dims
from kernels.decode_attention.hopper.splits import split_of
from kernels.decode_attention.hopper.tree import add_sink, fold, store_rows
from kernels.softmax.triton import NO_KEYS


@gluon.jit
def store_partial(
    partials, number, row_max, row_sum, acc, column, ok, ROWS: gl.constexpr, PAIRED: gl.constexpr, LAYOUT: gl.constexpr
):
    """State [COLUMNS] and acc [D, COLUMNS] of one partial, of all pairs counted together."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    D: gl.constexpr = acc.shape[0]
    slot = number.to(gl.int64) * ROWS
    d = value_dims(D, PAIRED, gl.SliceLayout(1, LAYOUT))
    gl.store(acc_ptr + slot * D + (column * D)[None, :] + d[:, None], acc, mask=ok[None, :])
    gl.store(row_max_ptr + slot + column, row_max, mask=ok)
    gl.store(row_sum_ptr + slot + column, row_sum, mask=ok)


@gluon.jit
def load_partial(partials, number, row, ok, at, ROWS: gl.constexpr, D: gl.constexpr):
    """A partial, past the first cache: another program has written it. Nothing where it is not `ok`."""
    acc_ptr, row_max_ptr, row_sum_ptr = partials
    slot = number.to(gl.int64) * ROWS
    row_max = gl.load(row_max_ptr + slot + row, mask=ok, other=NO_KEYS, cache_modifier=".cg")
    row_sum = gl.load(row_sum_ptr + slot + row, mask=ok, other=0.0, cache_modifier=".cg")
    acc = gl.load(acc_ptr + slot * D + at, mask=ok[:, None], other=0.0, cache_modifier=".cg")
    return row_max, row_sum, acc


@gluon.jit
def fold_next(state, group, partial, starts):
    """(state, group) with one more partial of the group, or with the group folded in where the partial starts another.

    A state without keys leaves the other one as it was, so the order of the folds is the tree's.
    """
    row_max, row_sum, acc = state
    group_max, group_sum, group_acc = group
    if starts:
        row_max, row_sum, acc = fold(row_max, row_sum, acc, group_max, group_sum, group_acc, 1)
        group_max = gl.full_like(group_max, NO_KEYS)
        group_sum = gl.zeros_like(group_sum)
        group_acc = gl.zeros_like(group_acc)
    group_max, group_sum, group_acc = fold(
        group_max, group_sum, group_acc, partial[0], partial[1], partial[2], 1
    )  # fmt: skip
    return (row_max, row_sum, acc), (group_max, group_sum, group_acc)


@gluon.jit
def first_step(pair, origin, tiles, PER_LEAF: gl.constexpr):
    """The walk over a pair's partials at its first leaf that is not skipped."""
    _, _, skipped, leaves, splits, share, _, _ = pair
    split = split_of(skipped - origin, splits, tiles, PER_LEAF)
    cut = (split + 1) * gl.maximum(tiles, share) + share // 2
    return skipped, split, split * 0, gl.where(split + 1 < splits, origin + cut // share, leaves), cut % share


@gluon.jit
def step(walk, pair, LEAVES_PER_GROUP: gl.constexpr):
    """((number of the partial that begins at this leaf, whether it starts a group, whether it exists), the next walk).

    A walk is the leaf, its split, what numbers of leaves alone count from, the first leaf of the next split, and what
    the division for that left over: splits follow each other without another division, as each is slow here.
    """
    leaf, split, alone, stop, rest = walk
    first_group, first_alone, skipped, leaves, splits, share, whole_leaves, more = pair
    exists = leaf < leaves
    if exists & (leaf >= stop):
        alone = first_alone + split * (LEAVES_PER_GROUP - 1) - stop
        split += 1
        rest += more
        stop += whole_leaves
        if rest >= share:
            rest -= share
            stop += 1
        if split + 1 == splits:
            stop = leaves
    group = leaf // LEAVES_PER_GROUP
    starts = leaf == gl.maximum(group * LEAVES_PER_GROUP, skipped)
    number = gl.where(starts, first_group + group, alone + leaf)
    following = gl.where(starts, gl.minimum((group + 1) * LEAVES_PER_GROUP, stop), leaf + 1)
    return (number, starts & exists, exists), (gl.where(exists, following, leaf), split, alone, stop, rest)


@gluon.jit
def merge_rows(
    partials,
    pair,
    origin,
    tiles,
    row,
    ok,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    PER_LEAF: gl.constexpr,
    LEAVES_PER_GROUP: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """State of a block of rows over all partials of a pair, of which nine are in flight at a time.

    Not eight: a step's splits are often 16, and one key more than 16 groups makes 17 partials.
    """
    BLOCK: gl.constexpr = row.shape[0]
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    at = (row * D)[:, None] + d[None, :]
    row_max = gl.full([BLOCK], NO_KEYS, gl.float32, gl.SliceLayout(1, LAYOUT))
    row_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([BLOCK, D], gl.float32, LAYOUT)
    state = (row_max, row_sum, acc)
    group = (row_max, row_sum, acc)
    walk = first_step(pair, origin, tiles, PER_LEAF)
    while walk[0] < pair[3]:
        p0, walk = step(walk, pair, LEAVES_PER_GROUP)
        s0 = load_partial(partials, p0[0], row, ok & p0[2], at, ROWS, D)
        p1, walk = step(walk, pair, LEAVES_PER_GROUP)
        s1 = load_partial(partials, p1[0], row, ok & p1[2], at, ROWS, D)
        p2, walk = step(walk, pair, LEAVES_PER_GROUP)
        s2 = load_partial(partials, p2[0], row, ok & p2[2], at, ROWS, D)
        p3, walk = step(walk, pair, LEAVES_PER_GROUP)
        s3 = load_partial(partials, p3[0], row, ok & p3[2], at, ROWS, D)
        p4, walk = step(walk, pair, LEAVES_PER_GROUP)
        s4 = load_partial(partials, p4[0], row, ok & p4[2], at, ROWS, D)
        p5, walk = step(walk, pair, LEAVES_PER_GROUP)
        s5 = load_partial(partials, p5[0], row, ok & p5[2], at, ROWS, D)
        p6, walk = step(walk, pair, LEAVES_PER_GROUP)
        s6 = load_partial(partials, p6[0], row, ok & p6[2], at, ROWS, D)
        p7, walk = step(walk, pair, LEAVES_PER_GROUP)
        s7 = load_partial(partials, p7[0], row, ok & p7[2], at, ROWS, D)
        p8, walk = step(walk, pair, LEAVES_PER_GROUP)
        s8 = load_partial(partials, p8[0], row, ok & p8[2], at, ROWS, D)
        state, group = fold_next(state, group, s0, p0[1])
        state, group = fold_next(state, group, s1, p1[1])
        state, group = fold_next(state, group, s2, p2[1])
        state, group = fold_next(state, group, s3, p3[1])
        state, group = fold_next(state, group, s4, p4[1])
        state, group = fold_next(state, group, s5, p5[1])
        state, group = fold_next(state, group, s6, p6[1])
        state, group = fold_next(state, group, s7, p7[1])
        state, group = fold_next(state, group, s8, p8[1])
    return fold(state[0], state[1], state[2], group[0], group[1], group[2], 1)


@gluon.jit
def fold_group(state, partial):
    """Returns the state with a group that is one partial. Its -0 becomes 0, as in a fold with nothing."""
    return fold(state[0], state[1], state[2], partial[0], partial[1], partial[2] + 0.0, 1)


@gluon.jit
def merge_groups(partials, first, stop, row, ok, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the state of a block of rows over partials first..stop, each a whole group; 10 are loaded at a time."""
    BLOCK: gl.constexpr = row.shape[0]
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    at = (row * D)[:, None] + d[None, :]
    row_max = gl.full([BLOCK], NO_KEYS, gl.float32, gl.SliceLayout(1, LAYOUT))
    row_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, LAYOUT))
    state = (row_max, row_sum, gl.zeros([BLOCK, D], gl.float32, LAYOUT))
    while first < stop:
        s0 = load_partial(partials, first + 0, row, ok & (first + 0 < stop), at, ROWS, D)
        s1 = load_partial(partials, first + 1, row, ok & (first + 1 < stop), at, ROWS, D)
        s2 = load_partial(partials, first + 2, row, ok & (first + 2 < stop), at, ROWS, D)
        s3 = load_partial(partials, first + 3, row, ok & (first + 3 < stop), at, ROWS, D)
        s4 = load_partial(partials, first + 4, row, ok & (first + 4 < stop), at, ROWS, D)
        s5 = load_partial(partials, first + 5, row, ok & (first + 5 < stop), at, ROWS, D)
        s6 = load_partial(partials, first + 6, row, ok & (first + 6 < stop), at, ROWS, D)
        s7 = load_partial(partials, first + 7, row, ok & (first + 7 < stop), at, ROWS, D)
        s8 = load_partial(partials, first + 8, row, ok & (first + 8 < stop), at, ROWS, D)
        s9 = load_partial(partials, first + 9, row, ok & (first + 9 < stop), at, ROWS, D)
        state = fold_group(state, s0)
        state = fold_group(state, s1)
        state = fold_group(state, s2)
        state = fold_group(state, s3)
        state = fold_group(state, s4)
        state = fold_group(state, s5)
        state = fold_group(state, s6)
        state = fold_group(state, s7)
        state = fold_group(state, s8)
        state = fold_group(state, s9)
        first += 10
    return state


@gluon.jit
def merge_pair(
    partials,
    base,
    skipped,
    leaves,
    origin,
    tiles,
    splits,
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
    PER_LEAF: gl.constexpr,
    LEAVES_PER_GROUP: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    BY_GROUP: gl.constexpr,
):
    """Merges all rows of a pair, BLOCK rows at a time, and writes the outputs; `tiles` are those from its origin on."""
    out_ptr, lse_ptr, sinks_ptr = outputs
    stride_out_token, stride_out_head, num_tokens = strides
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16] if D == 64 else [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    share = splits * PER_LEAF
    divided = gl.maximum(tiles, share)
    first_alone = base + (leaves + LEAVES_PER_GROUP - 1) // LEAVES_PER_GROUP
    pair = (base, first_alone, skipped, leaves, splits, share, divided // share, divided % share)
    for block in range(0, rows, BLOCK):
        row = block + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
        ok = row < rows
        if BY_GROUP and splits < 0:
            row_max, row_sum, acc = merge_groups(
                partials, base + skipped // LEAVES_PER_GROUP, first_alone, row, ok, ROWS, D, LAYOUT
            )
        else:
            row_max, row_sum, acc = merge_rows(
                partials, pair, origin, tiles, row, ok, ROWS, D, PER_LEAF, LEAVES_PER_GROUP, LAYOUT
            )
        q_head = head * GQA_GROUP + row % GQA_GROUP
        if HAS_SINKS:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sinks_ptr, q_head, ok & has_keys, 1)
        token = token_row + row // GQA_GROUP
        at = (token * stride_out_token + q_head * stride_out_head)[:, None] + d[None, :]
        lse_at = lse_ptr + q_head.to(gl.int64) * num_tokens + token
        store_rows(row_max, row_sum, acc, out_ptr + at, lse_at, value_scale, ok, 1, WANTS_LSE)
