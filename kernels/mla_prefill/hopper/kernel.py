"""mla_prefill in Gluon for Hopper: one producer warp streams keys and values, two consumer warpgroups attend.

Key tiles start at multiples of 128 of a call's keys and pass through one loop body; a tile of which a row sees nothing
leaves that row's state bit for bit as it was. A state that is stored after one call and loaded by the next goes on
where it stopped, so cutting the keys at multiples of 128 changes no bit either.

    work     (sequence, tile of 128 queries), most keys first; heads in sections, so that a section's keys stay in L2
    program  takes items from a counter; its producer runs ahead into the next item while the consumers finish this one
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.launches import allow_next_launch, wait_for_last_launch
from kernels.hopper.registers import opaque, settled
from kernels.hopper.softmax import declare_looks, first_weights, next_weights, row_sums, sums_in_two, thread_sums, weigh
from kernels.hopper.stages import give_back
from kernels.hopper.work_queue import take
from kernels.mla_prefill.hopper.output import RUNS, places, store_output, store_state
from kernels.mla_prefill.hopper.producer import KEYS_READ, VALUES_READ, produce
from kernels.softmax.triton import MASKED, NO_KEYS

BLOCK = 128


@gluon.jit
def _clear_tail(v, live, BLOCK: gl.constexpr):
    """Zeroes the rows past a sequence's last key: they are another's, or were never written, and 0 * NaN is not 0.

    Each consumer does so before its own product, whether the other one does or not: both write the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    STEP: gl.constexpr = 32
    for first in gl.static_range(0, BLOCK, STEP):
        part = v.slice(first, STEP, 0)
        row = first + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
        part.store(gl.where((row < live)[:, None], part.load(LAYOUT), 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _pass_over(step, count, k_full, v_full, STAGES: gl.constexpr):
    """Gives an item's key tiles back unread; returns the number of key tiles so far.

    A stage is given back when it is full, no earlier. Its named barrier counts warps and not whose they are: it opens
    for a producer's and eight consumers' warps. Of a full stage the producer has come through the barrier that the tile
    before it ended with, so each consumer's warps are counted once for this tile. Ahead of that, they would be counted
    for the tile before in place of the other consumer's, which may still read it, and it would be overwritten. For the
    same reason no warp can miss a phase of full: the next one waits for its own arrival.
    """
    for _tile in range(count):
        s = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_full.index(s), phase)
        give_back(KEYS_READ + s)
        mbarrier.wait(v_full.index(s), phase)
        give_back(VALUES_READ + s)
        step += 1
    return step


@gluon.jit
def _take_rows(work, turn, step, k_full, v_full, PASSES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Takes items from a turn on until one has rows of this consumer. Returns its seven numbers, its turn and the step.

    PASSES: of the second consumer where sequences have up to 64 queries, which leave it without rows. No queries are
    loaded for it, and it computes and stores nothing. What it would make took half of the tensor cores' time: 16 tokens
    of 32 heads behind 4,096 keys 64 us where they take 54, behind 16,384 201 and 159 (H200).
    """
    queue, queue_full, queue_empty = work
    head, q_start, tile, q_len, k_len, offset, count = take(queue, queue_full, queue_empty, turn)
    if PASSES:
        while (head >= 0) & (tile * BLOCK + BLOCK // 2 >= q_len):
            step = _pass_over(step, count, k_full, v_full, STAGES)
            turn += 1
            head, q_start, tile, q_len, k_len, offset, count = take(queue, queue_full, queue_empty, turn)
    return head, q_start, tile, q_len, k_len, offset, count, turn, step


@gluon.jit
def _consume(
    results,
    scale_log2,
    num_tokens,
    shared,
    bars,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    RESUMES: gl.constexpr,
    SUSPENDS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    PASSES: gl.constexpr,
):
    out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr = results
    q_nope, q_rope, k_nope, k_rope, v, queue = shared
    q_full, q_empty, k_full, v_full, queue_full, queue_empty = bars
    ROWS: gl.constexpr = BLOCK // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=VALUES, k_width=2)
    SR: gl.constexpr = gl.SliceLayout(1, SCORES)
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    loads = 0
    work = (queue, queue_full, queue_empty)
    head, q_start, tile, q_len, k_len, offset, count, turn, step = _take_rows(
        work, gl.to_tensor(0), gl.to_tensor(0), k_full, v_full, PASSES, BLOCK, STAGES
    )
    while head >= 0:
        query = tile * BLOCK + PART * ROWS + gl.arange(0, ROWS, SR)
        if RESUMES:
            stat_at, live, out_at, out_live = places(
                q_start, q_len, head, tile * BLOCK + PART * ROWS, opaque(num_tokens), HEADS, ROWS, SR, VALUES
            )
            base = gl.load(row_max_ptr + stat_at, mask=live, other=NO_KEYS)
            row_sum = gl.load(row_sum_ptr + stat_at, mask=live, other=0.0)
            acc = gl.load(acc_ptr + out_at, mask=out_live, other=0.0)
        else:
            # Above every masked score, so that the weight of one is 0 even in a row that has seen no key yet.
            base = gl.full([ROWS], NO_KEYS, gl.float32, SR)
            row_sum = gl.full([ROWS], 0.0, gl.float32, SR)
            acc = gl.zeros([ROWS, 128], gl.float32, VALUES)
        # Tiles before this one have no key that a row does not see.
        whole = gl.minimum(gl.maximum(offset + tile * BLOCK + PART * ROWS + 1, 0), k_len) // BLOCK
        last_seen = gl.minimum(offset + query, k_len - 1)
        if count > 0:
            mbarrier.wait(q_full.index(PART), loads & 1)
            loads += 1
            s = step % STAGES
            mbarrier.wait(k_full.index(s), (step // STAGES) & 1)
            part = warpgroup_mma(
                q_nope.index(PART), k_nope.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            part = warpgroup_mma(q_rope.index(PART), k_rope.index(s).permute((1, 0)), part, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[part])
            give_back(KEYS_READ + s)
            if whole <= 0:
                scores = gl.where(column[None, :] <= last_seen[:, None], scores, MASKED)
            if RESUMES:
                weights = weigh(scores, base, scale_log2)
                sums = thread_sums(weights)
                p, sums, base, row_sum, acc = next_weights(
                    scores, weights, sums, base, row_sum, acc, scale_log2, gl.bfloat16
                )
            else:
                p, sums, base = first_weights(scores, scale_log2, gl.bfloat16)
            for i in range(1, count):
                # This tile's scores are on their way before the last tile's values, which the softmax then hides.
                s = (step + i) % STAGES
                before = (step + i - 1) % STAGES
                mbarrier.wait(k_full.index(s), ((step + i) // STAGES) & 1)
                part = warpgroup_mma(
                    q_nope.index(PART), k_nope.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                part = warpgroup_mma(q_rope.index(PART), k_rope.index(s).permute((1, 0)), part, is_async=True)
                mbarrier.wait(v_full.index(before), ((step + i - 1) // STAGES) & 1)
                values = warpgroup_mma(gl.convert_layout(p, P), v.index(before), acc, is_async=True)
                row_sum += row_sums(sums, base)
                scores = warpgroup_mma_wait(1, deps=[part])
                give_back(KEYS_READ + s)
                if i >= whole:
                    scores = gl.where((i * BLOCK + column)[None, :] <= last_seen[:, None], scores, MASKED)
                weights = weigh(scores, base, scale_log2)
                early, rest = sums_in_two(weights)
                early = settled(early)  # a quarter of the weights is made while the last tile's values are added
                acc = warpgroup_mma_wait(0, deps=[values])
                give_back(VALUES_READ + before)
                p, sums, base, row_sum, acc = next_weights(
                    scores, weights, early + rest, base, row_sum, acc, scale_log2, gl.bfloat16
                )
            mbarrier.arrive(q_empty.index(PART), count=1)
            s = (step + count - 1) % STAGES
            mbarrier.wait(v_full.index(s), ((step + count - 1) // STAGES) & 1)
            if count * BLOCK > k_len:
                _clear_tail(v.index(s), k_len - (count - 1) * BLOCK, BLOCK)
            values = warpgroup_mma(gl.convert_layout(p, P), v.index(s), acc, is_async=True)
            row_sum += row_sums(sums, base)
            acc = warpgroup_mma_wait(0, deps=[values])
            give_back(VALUES_READ + s)
        step += count
        # Before this item's results are stored: what is read from shared memory would queue behind the stores.
        done_head = head
        done_start = q_start
        done_tile = tile
        done_len = q_len
        head, q_start, tile, q_len, k_len, offset, count, turn, step = _take_rows(
            work, turn + 1, step, k_full, v_full, PASSES, BLOCK, STAGES
        )
        # Not kept over the loop, which needs the registers.
        where = places(
            opaque(done_start),
            done_len,
            opaque(done_head),
            opaque(done_tile) * BLOCK + PART * ROWS,
            opaque(num_tokens),
            HEADS,
            ROWS,
            SR,
            VALUES if SUSPENDS else RUNS,
        )
        if SUSPENDS:
            store_state(acc_ptr, row_max_ptr, row_sum_ptr, where, base, row_sum, acc)
        else:
            store_output(out_ptr, lse_ptr, where, base, row_sum, acc, VALUES, WANTS_LSE)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@gluon.jit(do_not_specialize=["num_tokens", "section"])
def attend_ragged(
    q_nope_desc,
    q_rope_desc,
    k_nope_desc,
    k_rope_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    acc_ptr,
    row_max_ptr,
    row_sum_ptr,
    order_ptr,
    counts_ptr,
    cu_q_ptr,
    cu_k_ptr,
    offsets_ptr,
    scale_log2,
    num_tokens,
    section,
    stride_q_head,
    stride_nope_head,
    stride_rope_head,
    stride_v_head,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    MODE: gl.constexpr,
    RESUMES: gl.constexpr,
    SUSPENDS: gl.constexpr,
    WANTS_LSE: gl.constexpr,
    IDLES: gl.constexpr,
):
    """IDLES: sequences have few queries, so that tiles may leave the second consumer without rows."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_nope = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK // 2, 128], TILE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK // 2, 64], TILE)
    k_nope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], TILE)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 64], TILE)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], TILE)
    declare_looks()
    queue = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for s in gl.static_range(2):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=1)
        mbarrier.init(queue_full.index(s), count=1)
        mbarrier.init(queue_empty.index(s), count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
    shared = (q_nope, q_rope, k_nope, k_rope, v, queue)
    bars = (q_full, q_empty, k_full, v_full, queue_full, queue_empty)
    plan = (order_ptr, counts_ptr, cu_q_ptr, cu_k_ptr, offsets_ptr)
    results = (out_ptr, lse_ptr, acc_ptr, row_max_ptr, row_sum_ptr)
    strides = (stride_q_head, stride_nope_head, stride_rope_head, stride_v_head)
    allow_next_launch()
    wait_for_last_launch()
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (results, scale_log2, num_tokens, shared, bars,
                        0, HEADS, BLOCK, STAGES, RESUMES, SUSPENDS, WANTS_LSE, False)),
            (_consume, (results, scale_log2, num_tokens, shared, bars,
                        1, HEADS, BLOCK, STAGES, RESUMES, SUSPENDS, WANTS_LSE, IDLES)),
            (produce, (q_nope_desc, q_rope_desc, k_nope_desc, k_rope_desc, v_desc, plan, strides, section, shared,
                        bars, HEADS, BLOCK, STAGES, MODE, IDLES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
