"""The consumers of index_logits' wide blocks: keys in shared memory times the heads of two rows, and their logits.

While one product is added up the next is on its way:

    product      rows 0, 1: first keys | others | ... | last |         rows 2, 3: first keys | ...
    add up                             | first  | ...        | last  |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import release_read
from kernels.hopper.registers import opaque, opaque_zero_of
from kernels.hopper.work_queue import take

# Keys of a product, pairs of rows that have a place in shared memory, warpgroups.
KEYS, PAIRS, CONSUMERS = gl.constexpr(64), gl.constexpr(2), gl.constexpr(2)


@gluon.jit
def store_pair(scores, weight, counts, key, row, out_ptr, max_keys):
    """Adds up scores [keys, heads of two rows] and stores both rows' logits."""
    PLACE: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    HEADS: gl.constexpr = scores.shape[1] // 2
    logits = gl.sum((gl.maximum(scores, 0.0) * weight[None, :]).reshape([KEYS, 2, HEADS]), 2)
    first, second = gl.split(logits)
    to_ptr = out_ptr + row * max_keys + key
    gl.store(to_ptr, gl.convert_layout(first, PLACE), mask=key < counts[0])
    gl.store(to_ptr + max_keys, gl.convert_layout(second, PLACE), mask=key < counts[1])


@gluon.jit
def counts_of(row, end, num_keys_ptr, max_keys):
    """Returns how many keys two rows see, none behind the last row."""
    count = gl.load(num_keys_ptr + row, mask=row < end, other=0)
    next_count = gl.load(num_keys_ptr + row + 1, mask=row + 1 < end, other=0)
    return gl.minimum(count, max_keys), gl.minimum(next_count, max_keys)


@gluon.jit
def product(keys, queries, some, stage, zeros):
    """Scores [keys, heads of two rows], on their way."""
    return warpgroup_mma(keys.index(some), queries.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def score(
    num_keys_ptr, out_ptr, max_keys, keys, queries, weights, bars, work,
    PART: gl.constexpr, HEADS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 keys PART, PART + 2 and so on of each run's block, two rows at a time."""
    PRODUCTS: gl.constexpr = BLOCK // KEYS // CONSUMERS
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * HEADS, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, L)
    keys_full, keys_empty, q_full, q_empty = bars
    zeros = gl.zeros([KEYS, 2 * HEADS], gl.float32, L)
    # Opaque: the compiler would work it out for all partitions at once, before they have their registers, and spill.
    place = opaque(PART * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, L)))
    step = 0
    turn = 0
    begin, end, first, begin_0, begin_1, _, _ = take(work[0], work[1], work[2], turn)
    while begin >= 0:
        # Rows before this one see none of this consumer's keys.
        own = begin + ((begin_0, begin_1)[PART] - begin) // 2 * 2
        key = first + place
        for _ in range(begin, own, 2):
            s = step % PAIRS
            mbarrier.wait(q_full.index(s), (step // PAIRS) & 1)
            mbarrier.arrive(q_empty.index(s), count=1)
            step += 1
        if own >= end:
            for p in gl.static_range(PRODUCTS):
                mbarrier.wait(keys_full.index(CONSUMERS * p + PART), turn & 1)
                mbarrier.arrive(keys_empty.index(CONSUMERS * p + PART), count=1)
        for token in range(own, end, 2):
            s = step % PAIRS
            # Opaque: addresses of operands would be worked out before the loop and fill the registers.
            z = opaque_zero_of(step)
            mbarrier.wait(q_full.index(s), (step // PAIRS) & 1)
            mbarrier.wait(keys_full.index(PART), turn & 1)
            scores = product(keys, queries, z + PART, s, zeros)
            row = token.to(gl.int64)
            counts = counts_of(row, end, num_keys_ptr, max_keys)
            weight = weights.index(s).load(HEAD)
            for p in gl.static_range(PRODUCTS):
                if p + 1 < PRODUCTS:
                    mbarrier.wait(keys_full.index(CONSUMERS * (p + 1) + PART), turn & 1)
                    following = product(keys, queries, z + CONSUMERS * (p + 1) + PART, s, zeros)
                    done = warpgroup_mma_wait(1, deps=[scores])
                else:
                    done = warpgroup_mma_wait(0, deps=[scores])
                    release_read(q_empty.index(s))
                if token + 2 >= end:
                    mbarrier.arrive(keys_empty.index(CONSUMERS * p + PART), count=1)
                store_pair(done, weight, counts, key + CONSUMERS * p * KEYS, row, out_ptr, max_keys)
                if p + 1 < PRODUCTS:
                    scores = following
            step += 1
        turn += 1
        begin, end, first, begin_0, begin_1, _, _ = take(work[0], work[1], work[2], turn)
