"""The consumers of index_logits' tiles: keys in registers times the heads of a query, and what becomes of the scores.

relu, weights, sum over heads, the keys' scales, store. With two products of half the keys each, one is on its way while
the other is added up:

    product          rows 0, first keys | 0, others | 1, first | 1, others |
    add up                              | 0, first  | 0, others | 1, first | 1, others
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import release_read
from kernels.hopper.registers import opaque
from kernels.hopper.work_queue import take


@gluon.jit
def product(held, queries, stage, zeros):
    """Scores [keys, heads], on their way."""
    return warpgroup_mma(held, queries.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def store_logits(scores, weight, factor, key, row, count, out_ptr, max_keys, HAS_SCALES: gl.constexpr):
    logits = gl.sum(gl.maximum(scores, 0.0) * weight[None, :], 1)
    if HAS_SCALES:
        logits = logits * factor
    gl.store(out_ptr + row * max_keys + key, logits, mask=key < count)


@gluon.jit
def score_rows(
    token, step, is_first, num_keys_ptr, out_ptr, max_keys, held, held_2, factor, factor_2, key, zeros, queries,
    weights, bars,
    CHAINED: gl.constexpr, PRODUCTS: gl.constexpr, STAGES: gl.constexpr, HAS_SCALES: gl.constexpr,
):  # fmt: skip
    """CHAINED rows from `token` on. Returns the step behind them."""
    HEAD: gl.constexpr = gl.SliceLayout(0, zeros.type.layout)
    KEYS: gl.constexpr = zeros.shape[0]
    _, keys_empty, q_full, q_empty = bars
    s = step % STAGES
    mbarrier.wait(q_full.index(s), (step // STAGES) & 1)
    scores = product(held, queries, s, zeros)
    if PRODUCTS == 2:
        scores_2 = product(held_2, queries, s, zeros)
    for i in gl.static_range(CHAINED):
        row = (token + i).to(gl.int64)
        count = gl.minimum(gl.load(num_keys_ptr + row), max_keys)
        done = warpgroup_mma_wait(PRODUCTS - 1, deps=[scores])
        weight = weights.index(s).load(HEAD)
        if PRODUCTS == 1:
            release_read(q_empty.index(s))
        store_logits(done, weight, factor, key, row, count, out_ptr, max_keys, HAS_SCALES)
        t = (step + 1) % STAGES
        if i + 1 < CHAINED:
            mbarrier.wait(q_full.index(t), ((step + 1) // STAGES) & 1)
            scores = product(held, queries, t, zeros)
        if PRODUCTS == 2:
            done = warpgroup_mma_wait(1 if i + 1 < CHAINED else 0, deps=[scores_2])
            release_read(q_empty.index(s))
            store_logits(done, weight, factor_2, key + KEYS, row, count, out_ptr, max_keys, HAS_SCALES)
            if i + 1 < CHAINED:
                scores_2 = product(held_2, queries, t, zeros)
        s = t
        step += 1
    if is_first:
        # Only a product that took the keys proves that they have come out of shared memory.
        mbarrier.arrive(keys_empty.index(0), count=1)
    return step


@gluon.jit
def score(
    num_keys_ptr, out_ptr, max_keys, keys, factors, queries, weights, bars, work,
    PART: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr, PRODUCTS: gl.constexpr, CHAINED: gl.constexpr,
    STAGES: gl.constexpr, HAS_SCALES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: PRODUCTS times KEYS keys of each run's block, CHAINED rows in a row."""
    BITS: gl.constexpr = keys.dtype.primitive_bitwidth
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 256 // BITS]
    )
    HELD: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=32 // BITS)
    PLACE: gl.constexpr = gl.SliceLayout(1, L)
    FIRST: gl.constexpr = PART * PRODUCTS
    LAST: gl.constexpr = FIRST + PRODUCTS - 1
    keys_full, keys_empty, q_full, q_empty = bars
    zeros = gl.zeros([KEYS, HEADS], gl.float32, L)
    # Opaque: the compiler would work it out for all partitions at once, before they have their registers, and spill.
    place = opaque(FIRST * KEYS + gl.arange(0, KEYS, PLACE))
    step = 0
    turn = 0
    begin, end, first, begin_0, begin_1, begin_2, begin_3 = take(work[0], work[1], work[2], turn)
    while begin >= 0:
        # Rows before this one see none of this consumer's keys.
        own = (begin_0, begin_1, begin_2, begin_3)[PART]
        mbarrier.wait(keys_full.index(0), turn & 1)
        held = keys.index(FIRST).load(HELD)
        held_2 = keys.index(LAST).load(HELD)
        factor = factors.slice(FIRST * KEYS, KEYS, 0).load(PLACE)
        factor_2 = factors.slice(LAST * KEYS, KEYS, 0).load(PLACE)
        key = first + place
        for _ in range(begin, own):
            s = step % STAGES
            mbarrier.wait(q_full.index(s), (step // STAGES) & 1)
            mbarrier.arrive(q_empty.index(s), count=1)
            step += 1
        if own == end:
            mbarrier.arrive(keys_empty.index(0), count=1)
        grouped = own + (end - own) % CHAINED
        for token in range(own, grouped):
            step = score_rows(
                token, step, token == own, num_keys_ptr, out_ptr, max_keys, held, held_2, factor, factor_2, key, zeros,
                queries, weights, bars, 1, PRODUCTS, STAGES, HAS_SCALES,
            )  # fmt: skip
        for token in range(grouped, end, CHAINED):
            step = score_rows(
                token, step, token == own, num_keys_ptr, out_ptr, max_keys, held, held_2, factor, factor_2, key, zeros,
                queries, weights, bars, CHAINED, PRODUCTS, STAGES, HAS_SCALES,
            )  # fmt: skip
        turn += 1
        begin, end, first, begin_0, begin_1, begin_2, begin_3 = take(work[0], work[1], work[2], turn)
