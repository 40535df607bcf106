"""mla_decode in Gluon for Hopper: a tile of latents is loaded once and serves as keys and as values.

Knows nothing of the batch: the arithmetic is a fixed tree over a sequence's own positions (tiles of TILE latents,
leaves of LEAF, folded in ascending order), so its bits are the same whoever computes which part.

    warps          work on a tile of 64 rows (query heads, tokens) and TILE latents
    producer       copies the latents, a page's rows at a time, and the queries
    left           scores = q . latent over all 576 numbers, softmax, weights to shared memory; values 0 .. 255
    right          takes the weights; values 256 .. 511; it computes while left does the next softmax
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Gluon's name of the barrier among a partition's threads, in 3.6 and after it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _item(plan, index, HEADS: gl.constexpr, LEAF: gl.constexpr, MULTI: gl.constexpr):
    """(first query, queries, tile of rows, first leaf, leaves, keys, slot) of a planned item."""
    items_ptr, _, lengths_ptr, cu_q_ptr, _ = plan
    at = items_ptr + index * 5
    seq = gl.load(at)
    if MULTI:
        q_start = gl.load(cu_q_ptr + seq)
        q_len = gl.load(cu_q_ptr + seq + 1) - q_start
    else:
        q_start = seq
        q_len = 1
    length = gl.load(lengths_ptr + seq)
    return seq, q_start, q_len, gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), length, gl.load(at + 4)


@gluon.jit
def _boxes(row_ptr, key, last, page_rows, PAGE: gl.constexpr, BOX: gl.constexpr, COUNT: gl.constexpr):
    """First rows of a tile's boxes, read ahead of their use; past the end any of the sequence's, which are masked."""
    a = _box(row_ptr, key, last, page_rows, PAGE)
    if COUNT == 1:
        return (a, a, a, a, a, a, a, a)
    b = _box(row_ptr, key + BOX, last, page_rows, PAGE)
    if COUNT == 2:
        return (a, b, a, b, a, b, a, b)
    c = _box(row_ptr, key + 2 * BOX, last, page_rows, PAGE)
    d = _box(row_ptr, key + 3 * BOX, last, page_rows, PAGE)
    if COUNT == 4:
        return (a, b, c, d, a, b, c, d)
    e = _box(row_ptr, key + 4 * BOX, last, page_rows, PAGE)
    f = _box(row_ptr, key + 5 * BOX, last, page_rows, PAGE)
    g = _box(row_ptr, key + 6 * BOX, last, page_rows, PAGE)
    h = _box(row_ptr, key + 7 * BOX, last, page_rows, PAGE)
    return (a, b, c, d, e, f, g, h)


@gluon.jit
def _box(row_ptr, key, last, page_rows, PAGE: gl.constexpr):
    """The row of the pool where the box with this key begins."""
    return gl.load(row_ptr + gl.minimum(key // PAGE, last)) * page_rows + key % PAGE


@gluon.jit
def _produce(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    plan,
    page_rows,
    stride_tables_seq,
    shared,
    bars,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
):
    q_left, q_right, q_rope, left, right, rope = shared[0]
    q_full, q_empty, left_full, left_empty, right_full, right_empty = bars[0]
    BOX: gl.constexpr = PAGE if PAGE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    tables_ptr = plan[4]
    items = gl.load(plan[1])
    step = 0
    turn = 0
    index = gl.program_id(0)
    while index < items:
        seq, q_start, _q_len, tile, leaf, leaves, length, _slot = _item(plan, index, HEADS, LEAF, MULTI)
        row_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        last = gl.maximum((length - 1) // PAGE, 0)
        count = (gl.minimum(length - leaf * LEAF, leaves * LEAF) + TILE - 1) // TILE
        rows = _boxes(row_ptr, leaf * LEAF, last, page_rows, PAGE, BOX, BOXES)
        for i in range(count):
            ahead = _boxes(row_ptr, leaf * LEAF + (i + 1) * TILE, last, page_rows, PAGE, BOX, BOXES)
            s = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(left_empty.index(s), phase)
            mbarrier.expect(left_full.index(s), TILE * 320 * 2)
            for j in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    rope_desc, [rows[j], 512], left_full.index(s), rope.index(s).slice(j * BOX, BOX, 0)
                )
                tma.async_copy_global_to_shared(
                    half_desc, [rows[j], 0], left_full.index(s), left.index(s).slice(j * BOX, BOX, 0)
                )
            mbarrier.wait(right_empty.index(s), phase)
            mbarrier.expect(right_full.index(s), TILE * 256 * 2)
            for j in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    half_desc, [rows[j], 256], right_full.index(s), right.index(s).slice(j * BOX, BOX, 0)
                )
            if i == 0:
                # Behind the first latents: these have room before the last item's queries are done with.
                q_row = q_start * HEADS + tile * 64
                mbarrier.wait(q_empty, (turn & 1) ^ 1)
                mbarrier.expect(q_full, 64 * 576 * 2)
                tma.async_copy_global_to_shared(q_half_desc, [q_row, 0], q_full, q_left)
                tma.async_copy_global_to_shared(q_half_desc, [q_row, 256], q_full, q_right)
                tma.async_copy_global_to_shared(q_rope_desc, [q_row, 512], q_full, q_rope)
                turn += 1
            rows = ahead
            step += 1
        index += gl.num_programs(0)


@gluon.jit
def _clear_tail(values, live, TILE: gl.constexpr):
    """Zeroes the rows past a sequence's last latent: nobody wrote them, and 0 * NaN is not 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for first in gl.static_range(0, TILE, 16):
        part = values.slice(first, 16, 0)
        row = first + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where((row < live)[:, None], part.load(LAYOUT), 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _part_at(row, dim, ROWS: gl.constexpr):
    """Where a number of a partial result lies: eight of a row, then the next row's, so that a warp's stores touch."""
    return (dim // 8 * (ROWS * 8) + dim % 8)[None, :] + (row * 8)[:, None]


@gluon.jit
def _fold(sum_ptr, at, acc, keep, weight, mask):
    """The running total of the leaves so far, and this leaf's part in it."""
    total = gl.load(sum_ptr + at, mask=mask, other=0.0)
    return gl.fma(total, keep + gl.zeros_like(total), acc * weight)


@gluon.jit
def _attend_left(
    plan,
    results,
    scale_log2,
    num_tokens,
    shared,
    bars,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    out_ptr, lse_ptr, acc_ptr, peak_ptr, total_ptr, sum_ptr = results
    q_left, q_right, q_rope, left, right, rope = shared[0]
    handed, decays, folds = shared[1]
    q_full, q_empty, left_full, left_empty, right_full, _ = bars[0]
    hand_full, hand_empty, fold_full, fold_empty = bars[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    LN_2: gl.constexpr = 0.6931471805599453
    row = gl.arange(0, 64, SR)
    out_row = gl.arange(0, 64, OR)
    column = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    dim = gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    zeros = gl.zeros([64, TILE], gl.float32, SCORES)
    sum_at = gl.program_id(0) * (64 * 512) + _part_at(out_row, dim, 64)
    slot_at = _part_at(out_row, dim, SLOT_ROWS)
    items = gl.load(plan[1])
    step = 0
    turn = 0
    folded = 0
    index = gl.program_id(0)
    while index < items:
        _seq, q_start, q_len, tile, leaf, leaves, length, slot = _item(plan, index, HEADS, LEAF, MULTI)
        live = row < q_len * HEADS - tile * 64
        out_live = (out_row < q_len * HEADS - tile * 64)[:, None]
        token = gl.minimum((tile * 64 + row) // HEADS, q_len - 1)
        last_seen = length - q_len + token
        if length > 0:
            mbarrier.wait(q_full, turn & 1)
            turn += 1
        sum_peak = gl.full([64], -1.0e20, gl.float32, SR)
        sum_total = gl.full([64], 0.0, gl.float32, SR)
        for n in range(leaves):
            start = (leaf + n) * LEAF
            count = (gl.minimum(length - start, LEAF) + TILE - 1) // TILE
            # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
            peak = gl.full([64], -1.0e20, gl.float32, SR)
            total = gl.full([64], 0.0, gl.float32, SR)
            acc = gl.zeros([64, 256], gl.float32, VALUES)
            for i in range(count):
                s = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(left_full.index(s), phase)
                part = warpgroup_mma(q_rope, rope.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                part = warpgroup_mma(q_left, left.index(s).permute((1, 0)), part, is_async=True)
                mbarrier.wait(right_full.index(s), phase)
                part = warpgroup_mma(q_right, right.index(s).permute((1, 0)), part, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[part])
                first = start + i * TILE
                if first + TILE > length - q_len + 1:
                    scores = gl.where((first + column)[None, :] <= last_seen[:, None], scores, -1.0e30)
                new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
                weights = gl.exp2(scores * scale_log2 - new_peak[:, None])
                decay = gl.exp2(peak - new_peak)
                peak = new_peak
                half = weights.to(gl.bfloat16)
                mbarrier.wait(hand_empty, (step & 1) ^ 1)
                handed.store(half)
                decays.store(decay)
                thread_barrier()
                mbarrier.arrive(hand_full, count=1)
                total = gl.fma(total, decay, gl.sum(weights, 1))
                acc = acc * gl.convert_layout(decay, OR)[:, None]
                if first + TILE > length:
                    _clear_tail(left.index(s), length - first, TILE)
                values = warpgroup_mma(gl.convert_layout(half, P), left.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[values])
                mbarrier.arrive(left_empty.index(s), count=1)
                step += 1
            if (n == leaves - 1) & (count > 0):
                mbarrier.arrive(q_empty, count=1)
            if slot >= 0:
                at = slot.to(gl.int64) * SLOT_ROWS
                gl.store(acc_ptr + at * 512 + slot_at, acc, mask=out_live)
                gl.store(peak_ptr + at + row, peak, mask=live)
                gl.store(total_ptr + at + row, total, mask=live)
            else:
                new_peak = gl.maximum(sum_peak, peak)
                keep = gl.exp2(sum_peak - new_peak)
                weight = gl.exp2(peak - new_peak)
                sum_total = gl.where(n == 0, total, gl.fma(sum_total, keep, total * weight))
                sum_peak = new_peak
                share = 1.0 / gl.where(sum_total == 0.0, 1.0, sum_total)
                mbarrier.wait(fold_empty, (folded & 1) ^ 1)
                folds.index(0).store(keep)
                folds.index(1).store(weight)
                folds.index(2).store(share)
                thread_barrier()
                mbarrier.arrive(fold_full, count=1)
                folded += 1
                if n > 0:
                    acc = _fold(
                        sum_ptr,
                        sum_at,
                        acc,
                        gl.convert_layout(keep, OR)[:, None],
                        gl.convert_layout(weight, OR)[:, None],
                        out_live,
                    )
                if n < leaves - 1:
                    gl.store(sum_ptr + sum_at, acc, mask=out_live)
                else:
                    at = (q_start * HEADS + tile * 64).to(gl.int64)
                    result = (acc * gl.convert_layout(share, OR)[:, None]).to(gl.bfloat16)
                    gl.store(out_ptr + (at + out_row)[:, None] * 512 + dim[None, :], result, mask=out_live)
                    if WANTS_LSE:
                        lse = gl.where(sum_total == 0.0, float("-inf"), (sum_peak + gl.log2(sum_total)) * LN_2)
                        lse_at = ((tile * 64 + row) % HEADS).to(gl.int64) * num_tokens + q_start + token
                        gl.store(lse_ptr + lse_at, lse, mask=live)
        index += gl.num_programs(0)


@gluon.jit
def _attend_right(
    plan,
    results,
    shared,
    bars,
    HEADS: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
):
    out_ptr, _, acc_ptr, _, _, sum_ptr = results
    _, _, _, _, right, _ = shared[0]
    handed, decays, folds = shared[1]
    _, _, _, _, _, right_empty = bars[0]
    hand_full, hand_empty, fold_full, fold_empty = bars[1]
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    OR: gl.constexpr = gl.SliceLayout(1, VALUES)
    row = gl.arange(0, 64, OR)
    dim = 256 + gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    sum_at = gl.program_id(0) * (64 * 512) + _part_at(row, dim, 64)
    slot_at = _part_at(row, dim, SLOT_ROWS)
    items = gl.load(plan[1])
    step = 0
    folded = 0
    index = gl.program_id(0)
    while index < items:
        _seq, q_start, q_len, tile, leaf, leaves, length, slot = _item(plan, index, HEADS, LEAF, MULTI)
        live = (row < q_len * HEADS - tile * 64)[:, None]
        for n in range(leaves):
            start = (leaf + n) * LEAF
            count = (gl.minimum(length - start, LEAF) + TILE - 1) // TILE
            acc = gl.zeros([64, 256], gl.float32, VALUES)
            for i in range(count):
                s = step % STAGES
                mbarrier.wait(hand_full, step & 1)
                weights = handed.load(P)
                decay = decays.load(OR)
                thread_barrier()
                mbarrier.arrive(hand_empty, count=1)
                acc = acc * decay[:, None]
                if start + (i + 1) * TILE > length:
                    _clear_tail(right.index(s), length - start - i * TILE, TILE)
                values = warpgroup_mma(weights, right.index(s), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[values])
                mbarrier.arrive(right_empty.index(s), count=1)
                step += 1
            if slot >= 0:
                at = slot.to(gl.int64) * SLOT_ROWS
                gl.store(acc_ptr + at * 512 + slot_at, acc, mask=live)
            else:
                mbarrier.wait(fold_full, folded & 1)
                keep = folds.index(0).load(OR)
                weight = folds.index(1).load(OR)
                share = folds.index(2).load(OR)
                thread_barrier()
                mbarrier.arrive(fold_empty, count=1)
                folded += 1
                if n > 0:
                    acc = _fold(sum_ptr, sum_at, acc, keep[:, None], weight[:, None], live)
                if n < leaves - 1:
                    gl.store(sum_ptr + sum_at, acc, mask=live)
                else:
                    at = (q_start * HEADS + tile * 64).to(gl.int64)
                    result = (acc * share[:, None]).to(gl.bfloat16)
                    gl.store(out_ptr + (at + row)[:, None] * 512 + dim[None, :], result, mask=live)
        index += gl.num_programs(0)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_latents(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    out_ptr,
    lse_ptr,
    acc_ptr,
    peak_ptr,
    total_ptr,
    sum_ptr,
    items_ptr,
    counts_ptr,
    lengths_ptr,
    cu_q_ptr,
    tables_ptr,
    scale_log2,
    num_tokens,
    page_rows,
    stride_tables_seq,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    LEAF: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTI: gl.constexpr,
    SLOT_ROWS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    HANDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * TILE, element_bitwidth=16, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], LAYOUT)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 256], LAYOUT)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, 64], LAYOUT)
    handed = gl.allocate_shared_memory(gl.bfloat16, [64, TILE], HANDED)
    decays = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    folds = gl.allocate_shared_memory(gl.float32, [3, 64], VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    left_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    hand_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    hand_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    fold_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    fold_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(hand_full, count=1)
    mbarrier.init(hand_empty, count=1)
    mbarrier.init(fold_full, count=1)
    mbarrier.init(fold_empty, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(left_full.index(s), count=1)
        mbarrier.init(left_empty.index(s), count=1)
        mbarrier.init(right_full.index(s), count=1)
        mbarrier.init(right_empty.index(s), count=1)
    plan = (items_ptr, counts_ptr, lengths_ptr, cu_q_ptr, tables_ptr)
    results = (out_ptr, lse_ptr, acc_ptr, peak_ptr, total_ptr, sum_ptr)
    shared = ((q_left, q_right, q_rope, left, right, rope), (handed, decays, folds))
    bars = (
        (q_full, q_empty, left_full, left_empty, right_full, right_empty),
        (hand_full, hand_empty, fold_full, fold_empty),
    )
    # fmt: off
    gl.warp_specialize(
        [
            (_attend_left, (plan, results, scale_log2, num_tokens, shared, bars,
                            HEADS, LEAF, TILE, STAGES, MULTI, SLOT_ROWS, WANTS_LSE)),
            (_attend_right, (plan, results, shared, bars, HEADS, LEAF, TILE, STAGES, MULTI, SLOT_ROWS)),
            (_produce, (q_half_desc, q_rope_desc, half_desc, rope_desc, plan, page_rows, stride_tables_seq,
                        shared, bars, HEADS, PAGE, LEAF, TILE, STAGES, MULTI)),
        ],
        [4, 1],
        [208, 40],
    )
    # fmt: on
