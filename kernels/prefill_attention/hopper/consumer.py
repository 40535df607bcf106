"""A consumer warpgroup: 64 rows of a tile, its products on the tensor cores, softmax, and the store.

Key tiles arrive in shared memory, values with garbage where no key is. QK of a tile is issued before PV of the one
before it, so that the tensor cores work while softmax does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import settled
from kernels.hopper.softmax import first_weights, next_weights, row_sums, sums_in_two, weigh
from kernels.prefill_attention.hopper.output import write_rows
from kernels.prefill_attention.hopper.stages import first_scores, pass_over, take_queries
from kernels.prefill_attention.hopper.tiles import key_tiles, read_tile
from kernels.prefill_attention.hopper.weights import capped, clear_hidden_values, visible, zero


@gluon.jit
def consume(
    out_ptr, lse_ptr, sinks_ptr, k_scales_ptr, v_scales_ptr, scale_log2, cap_log2, num_tokens,
    stride_out_token, stride_out_head, qs, ks, vs, queue,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    PART: gl.constexpr, GQA_GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, SCALES: gl.constexpr, Q_REGISTERS: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Half of a tile's rows: 64 of them in one warpgroup."""
    ROWS: gl.constexpr = 64
    QUERIES: gl.constexpr = 128 // GQA_GROUP
    DTYPE: gl.constexpr = qs.dtype
    NARROWS: gl.constexpr = ks.dtype != DTYPE
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    QL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SL, k_width=2)
    RS: gl.constexpr = gl.SliceLayout(1, SL)
    RO: gl.constexpr = gl.SliceLayout(1, OL)
    # Where registers suffice, the threads' sums are brought together while the next scores are made, and a quarter of
    # the weights is made while the last tile's values are added; over fp8 pages that costs 2 %.
    OVERLAPS: gl.constexpr = D <= 128
    zeros = gl.zeros([ROWS, BN], gl.float32, SL)
    if SCALES:
        # Quantized values: the keys' scale goes to where scores are scaled, the values' scale to the output.
        if CAP:
            cap_log2 = cap_log2 * gl.load(k_scales_ptr)
        else:
            scale_log2 = scale_log2 * gl.load(k_scales_ptr)
    step = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    head, first, token, q_len, kv_len, half = read_tile(queue, HALVES)
    while head >= 0:
        lowest, start, stop = key_tiles(first, half, q_len, kv_len, GQA_GROUP, WINDOW, BN)
        if (half < 0) | (half == PART):
            cached = kv_len - q_len
            nfull = (cached + first + 1) // BN
            last_low = cached + first + QUERIES - WINDOW
            position = cached + first + (PART * ROWS + gl.arange(0, ROWS, RS) + zero(D)) // GQA_GROUP
            acc = gl.zeros([ROWS, D], gl.float32, OL)
            row_sum = gl.full([ROWS], 0.0, gl.float32, RS)
            q, scale, cap = take_queries(qs, scale_log2, cap_log2, PART, CAP, NARROWS, Q_REGISTERS, QL, RS)
            slot = step % STAGES
            scores = first_scores(q, ks, k_full, k_empty, q_empty, zeros, step, Q_REGISTERS, STAGES)
            scores = visible(capped(scores, cap, CAP, NARROWS), start, position, nfull, last_low, WINDOW, BN, SL)
            p, sums, base = first_weights(scores, scale, ks.dtype, NARROWS)
            if not OVERLAPS:
                row_sum = row_sums(sums, base)
            if WINDOW > 0:
                clear_hidden_values(
                    vs.index(slot), v_full.index(slot), (step // STAGES) & 1, start, lowest, kv_len, BN, D
                )
            for tile in range(start + 1, stop):
                before = step % STAGES
                before_phase = (step // STAGES) & 1
                step += 1
                slot = step % STAGES
                mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
                scores = warpgroup_mma(q, ks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), before_phase)
                acc = warpgroup_mma(gl.convert_layout(p, PL), vs.index(before), acc, is_async=True)
                if OVERLAPS:
                    row_sum += row_sums(sums, base)
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_empty.index(slot), count=1)
                scores = visible(capped(scores, cap, CAP, NARROWS), tile, position, nfull, last_low, WINDOW, BN, SL)
                weights = weigh(scores, base, scale, NARROWS)
                early, rest = sums_in_two(weights)
                if OVERLAPS and not SCALES:
                    early = settled(early)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(before), count=1)
                p, sums, base, row_sum, acc = next_weights(
                    scores, weights, early + rest, base, row_sum, acc, scale, ks.dtype, NARROWS
                )
                if not OVERLAPS:
                    row_sum += row_sums(sums, base)
            if not Q_REGISTERS:
                mbarrier.arrive(q_empty.index(0), count=1)
            before = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(v_full.index(before), phase)
            clear_hidden_values(vs.index(before), v_full.index(before), phase, stop - 1, lowest, kv_len, BN, D)
            acc = warpgroup_mma(gl.convert_layout(p, PL), vs.index(before), acc, is_async=True)
            if OVERLAPS:
                row_sum += row_sums(sums, base)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            step += 1
            write_rows(
                out_ptr, lse_ptr, sinks_ptr, v_scales_ptr, num_tokens, stride_out_token, stride_out_head,
                head, first, token, q_len, base, row_sum, acc,
                PART, GQA_GROUP, DIM, D, WANTS_LSE, HAS_SINKS, SCALES, DTYPE, RS, RO,
            )  # fmt: skip
        else:
            thread_barrier()
            mbarrier.arrive(q_empty.index(0), count=1)
            step = pass_over(k_full, k_empty, v_full, v_empty, stop - start, step, STAGES)
        turn += 1
        mbarrier.wait(q_full.index(0), turn & 1)
        head, first, token, q_len, kv_len, half = read_tile(queue, HALVES)
