"""The consumer: walks the program's splits, sums each along the tree, finishes pairs that it holds whole.

Tiles arrive in a ring, in the order in which this partition walks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.decode_attention.hopper.merge import merge_pair, store_partial
from kernels.decode_attention.hopper.quantized import query_operand, value_dims
from kernels.decode_attention.hopper.splits import lowest_key, origin_of, others_of, query_span, read_split, split_of
from kernels.decode_attention.hopper.tree import add_sink, fold, fold_parked, nothing, store_rows, sum_leaf
from kernels.hopper.barriers import thread_barrier
from kernels.hopper.work_queue import take_index


@gluon.jit
def load_queries(
    q_ptr,
    strides_q,
    token_row,
    head,
    rows,
    GQA_GROUP: gl.constexpr,
    COLUMNS: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """[COLUMNS, D]: the pair's heads of each token, zero beyond its rows."""
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    token = (token_row + row // GQA_GROUP).to(gl.int64)
    at = token * strides_q[0] + (head * GQA_GROUP + row % GQA_GROUP) * strides_q[1]
    return gl.load(q_ptr + at[:, None] + d[None, :], mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def next_split(splits_ptr, num_splits, queue, queue_full, queue_empty, turn):
    """(number, place) of the program's next split; behind the last one some split's place, so that loading is safe."""
    split = num_splits
    if num_splits > gl.num_programs(0):
        split = take_index(queue, queue_full, queue_empty, turn, 4)
    own, _ = read_split(splits_ptr, gl.minimum(split, num_splits - 1))
    return split, own


@gluon.jit
def queries_of(
    q_ptr,
    strides_q,
    own,
    cu_seqlens_ptr,
    token_first,
    TOKENS: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    GQA_GROUP: gl.constexpr,
    COLUMNS: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The queries of a split."""
    start, _, count = query_span(cu_seqlens_ptr, own[0], token_first, TOKENS, HAS_SPANS)
    return load_queries(q_ptr, strides_q, start + token_first, own[1], count * GQA_GROUP, GQA_GROUP, COLUMNS, D, LAYOUT)


@gluon.jit
def write_rows(
    row_max,
    row_sum,
    acc,
    outputs,
    strides,
    token_row,
    head,
    column,
    ok,
    value_scale,
    has_keys,
    GQA_GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
    LAYOUT: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    """Writes a pair's outputs from registers."""
    out_ptr, lse_ptr, sinks_ptr = outputs
    stride_out_token, stride_out_head, num_tokens = strides
    D: gl.constexpr = acc.shape[0]
    d = value_dims(D, PAIRED, gl.SliceLayout(1, LAYOUT))
    q_head = head * GQA_GROUP + column % GQA_GROUP
    if HAS_SINKS:
        row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sinks_ptr, q_head, ok & has_keys, 0)
    row = token_row + column // GQA_GROUP
    at = (row * stride_out_token + q_head * stride_out_head)[None, :] + d[:, None]
    lse_at = lse_ptr + q_head.to(gl.int64) * num_tokens + row
    store_rows(row_max, row_sum, acc, out_ptr + at, lse_at, value_scale, ok, 0, WANTS_LSE)


@gluon.jit
def attend(
    q_ptr,
    strides_q,
    outputs,
    strides_out,
    partials,
    splits_ptr,
    arrivals_ptr,
    cu_seqlens_ptr,
    token_first,
    factors,
    rings,
    barriers,
    queue,
    queue_full,
    queue_empty,
    parked,
    place,
    HEADS: gl.constexpr,
    GQA_GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    HAS_SPANS: gl.constexpr,
    ROWS: gl.constexpr,
    LEAF: gl.constexpr,
    LEAVES_PER_GROUP: gl.constexpr,
    PARKED: gl.constexpr,
    WINDOW: gl.constexpr,
    PLANNED: gl.constexpr,
    SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    BY_GROUP: gl.constexpr,
):
    """Computes all of this program's splits; ROWS is the room that a partial has for rows."""
    q_smem = rings[0]
    scale, cap, value_scale = factors
    COLUMNS: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    TILE: gl.constexpr = rings[2].shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8] if D == 64 else [2, 16], [4, 1], [1, 0])
    QUANTIZED: gl.constexpr = rings[2].dtype == gl.float8e4nv
    # The next split's numbers and queries wait in registers, if that leaves enough of them.
    AHEAD: gl.constexpr = PARKED < 2 - QUANTIZED and (TOKENS == 1 or not QUANTIZED)
    BLOCK: gl.constexpr = 4 if ROWS <= 4 or D > 128 else 8
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    tile = 0
    turn = 0
    split = place
    own, num_splits = read_split(splits_ptr, split)
    if AHEAD:
        q = queries_of(
            q_ptr, strides_q, own, cu_seqlens_ptr, token_first, TOKENS, HAS_SPANS, GQA_GROUP, COLUMNS, D, Q_LAYOUT
        )
    while split < num_splits:
        seq, head, begin, held, length, splits, base = own
        start, tokens, count = query_span(cu_seqlens_ptr, seq, token_first, TOKENS, HAS_SPANS)
        rows = count * GQA_GROUP
        if not AHEAD:
            q = load_queries(q_ptr, strides_q, start + token_first, head, rows, GQA_GROUP, COLUMNS, D, Q_LAYOUT)
        thread_barrier()
        unit_scores = scale  # of quantized keys alone
        if QUANTIZED:
            q, unit_scores = query_operand(q)
            unit_scores = gl.convert_layout(unit_scores, gl.SliceLayout(0, LAYOUT))
        q_smem.index(0).store(q)
        fence_async_shared()
        thread_barrier()
        if AHEAD:
            # The next split's numbers are on their way while this one is summed.
            split, own = next_split(splits_ptr, num_splits, queue, queue_full, queue_empty, turn)
        first_position = length - tokens + token_first
        low = lowest_key(first_position, length, WINDOW)
        skipped = low // LEAF
        leaves = gl.maximum((length + LEAF - 1) // LEAF, 1)
        origin = origin_of(length, PLANNED, LEAF)
        tiles = gl.maximum((length + TILE - 1) // TILE, 1) - origin * (LEAF // TILE)
        end = begin + held
        whole = (begin <= skipped) & (end == leaves)
        spare = base + (leaves + LEAVES_PER_GROUP - 1) // LEAVES_PER_GROUP
        spare += (split_of(begin - origin, splits, tiles, LEAF // TILE) - 1) * (LEAVES_PER_GROUP - 1) - begin
        ok = column < rows
        token = gl.minimum(column // GQA_GROUP, count - 1)
        token_row = (start + token_first).to(gl.int64)
        row_max, row_sum, acc = nothing(D, COLUMNS, LAYOUT)
        if PARKED > 0:
            parked.index(0).store(acc)
        first = gl.maximum(begin, skipped)
        while first < end:
            # Leaves behind a cut within a group stay alone: the group's sum begins in another split.
            group = first // LEAVES_PER_GROUP
            alone = first > gl.maximum(group * LEAVES_PER_GROUP, skipped)
            stop = gl.where(alone, first + 1, gl.minimum((group + 1) * LEAVES_PER_GROUP, end))
            group_max, group_sum, group_acc = nothing(D, COLUMNS, LAYOUT)
            if PARKED > 1:
                parked.index(1).store(group_acc)
            for leaf in range(first, stop):
                leaf_max, leaf_sum, leaf_acc, tile = sum_leaf(
                    rings, barriers, tile, leaf * LEAF, low, length, first_position, token, unit_scores, scale, cap,
                    LEAF, TOKENS, WINDOW, SOFTCAP, LAYOUT,
                )  # fmt: skip
                if PARKED > 1:
                    group_max, group_sum = fold_parked(
                        group_max, group_sum, parked.index(1), leaf_max, leaf_sum, leaf_acc, LAYOUT
                    )  # fmt: skip
                else:
                    group_max, group_sum, group_acc = fold(
                        group_max, group_sum, group_acc, leaf_max, leaf_sum, leaf_acc, 0
                    )
            if PARKED > 1:
                group_acc = parked.index(1).load(LAYOUT)
            if whole:
                if PARKED > 0:
                    row_max, row_sum = fold_parked(
                        row_max, row_sum, parked.index(0), group_max, group_sum, group_acc, LAYOUT
                    )
                else:
                    row_max, row_sum, acc = fold(row_max, row_sum, acc, group_max, group_sum, group_acc, 0)
            else:
                number = gl.where(alone, spare + first, base + group)
                store_partial(partials, number, group_max, group_sum, group_acc, column, ok, ROWS, QUANTIZED, LAYOUT)
            first = stop
        if AHEAD:
            q = queries_of(
                q_ptr, strides_q, own, cu_seqlens_ptr, token_first, TOKENS, HAS_SPANS, GQA_GROUP, COLUMNS, D, Q_LAYOUT
            )
        if whole:
            if PARKED > 0:
                acc = parked.index(0).load(LAYOUT)
            write_rows(
                row_max, row_sum, acc, outputs, strides_out, token_row, head, column, ok, value_scale, length > 0,
                GQA_GROUP, QUANTIZED, LAYOUT, HAS_SINKS, WANTS_LSE,
            )  # fmt: skip
        if (whole == 0) & (end > skipped):
            others = others_of(skipped, origin, splits, tiles, LEAF // TILE, LEAVES_PER_GROUP, BY_GROUP)
            thread_barrier()
            arrived = gl.atomic_add(arrivals_ptr + seq * HEADS + head, 1, sem="acq_rel", scope="gpu")
            if arrived == others:  # the last of this pair's splits
                gl.store(arrivals_ptr + seq * HEADS + head, 0)
                merge_pair(
                    partials, base, skipped, leaves, origin, tiles, splits, rows, head, token_row, outputs, strides_out,
                    value_scale, length > 0, ROWS, GQA_GROUP, D, BLOCK, LEAF // TILE, LEAVES_PER_GROUP, WANTS_LSE,
                    HAS_SINKS, BY_GROUP,
                )  # fmt: skip
        if not AHEAD:
            split, own = next_split(splits_ptr, num_splits, queue, queue_full, queue_empty, turn)
        turn += 1
