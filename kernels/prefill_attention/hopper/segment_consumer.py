"""A consumer warpgroup: 64 rows of a tile, its products on the tensor cores, softmax over segments of keys.

Key tiles arrive in shared memory, values with garbage where no key is. QK of a tile is issued before PV of the one
before it, so that the tensor cores work while softmax does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper.softmax import first_weights, row_sums
from kernels.hopper.work_queue import read_number
from kernels.prefill_attention.hopper.output import write_rows
from kernels.prefill_attention.hopper.segment_keys import attend_keys, begin_segment
from kernels.prefill_attention.hopper.segment_pieces import piece_keys, read_piece
from kernels.prefill_attention.hopper.segment_states import add_to, hand_over, own_program
from kernels.prefill_attention.hopper.stages import first_scores, pass_over, take_queries
from kernels.prefill_attention.hopper.weights import capped, clear_hidden_values, visible, zero


@gluon.jit
def _attend_piece(
    out_ptr, lse_ptr, sinks_ptr, arrivals_ptr, states, v_scales_ptr, scale_log2, cap_log2, num_tokens,
    stride_out_token, stride_out_head, qs, stages, queue, q_empty, head, first, q_len, kv_len, segment, step, turn,
    PART: gl.constexpr, HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr,
    CAP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, SCALES: gl.constexpr, Q_REGISTERS: gl.constexpr,
    SEGMENT: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile over the keys of a piece; returns the number of key tiles so far."""
    ROWS: gl.constexpr = 64
    QUERIES: gl.constexpr = 128 // GQA_GROUP
    ks, vs, k_full, k_empty, v_full, v_empty = stages
    DTYPE: gl.constexpr = ks.dtype
    NARROWS: gl.constexpr = qs.dtype != DTYPE
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    QL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SL, k_width=2)
    RS: gl.constexpr = gl.SliceLayout(1, SL)
    RO: gl.constexpr = gl.SliceLayout(1, OL)
    zeros = gl.zeros([ROWS, BN], gl.float32, SL)
    cached = kv_len - q_len
    start, stop = piece_keys(first, q_len, kv_len, segment, QUERIES, BN, SEGMENT)
    position = cached + first + (PART * ROWS + gl.arange(0, ROWS, RS) + zero(D)) // GQA_GROUP
    # Rows' positions, how many first tiles all rows see wholly, and that there is no window.
    hidden = (position, (cached + first + 1) // BN, 0)
    q, scale, cap = take_queries(qs, scale_log2, cap_log2, PART, CAP, NARROWS, Q_REGISTERS, QL, RS)
    scores = first_scores(q, ks, k_full, k_empty, q_empty, zeros, step, Q_REGISTERS, STAGES)
    scores = visible(capped(scores, cap, CAP, NARROWS), start, *hidden, 0, BN, SL)
    p, sums, base = first_weights(scores, scale, DTYPE, NARROWS)
    row_sum = row_sums(sums, base)
    acc = gl.zeros([ROWS, D], gl.float32, OL)
    if SEGMENT == 0:
        p, base, row_sum, acc, step = attend_keys(
            q, p, base, row_sum, acc, start + 1, stop, step, scale, cap, hidden, stages, zeros,
            CAP, NARROWS, BN, STAGES, SL,
        )  # fmt: skip
    else:
        PER_SEGMENT: gl.constexpr = SEGMENT // BN
        for part in range(start // PER_SEGMENT, (stop + PER_SEGMENT - 1) // PER_SEGMENT):
            end = gl.minimum((part + 1) * PER_SEGMENT, stop)
            p, base, row_sum, acc, step = attend_keys(
                q, p, base, row_sum, acc, gl.maximum(part * PER_SEGMENT, start) + 1, end, step,
                scale, cap, hidden, stages, zeros, CAP, NARROWS, BN, STAGES, SL,
            )  # fmt: skip
            if end < stop:
                p, base, row_sum, acc, step = begin_segment(
                    q, p, base, row_sum, acc, end, step, scale, cap, hidden, stages, zeros, states,
                    part > start // PER_SEGMENT, PART, CAP, NARROWS, BN, STAGES, D, SL, OL, RS, RO,
                )  # fmt: skip
    if not Q_REGISTERS:
        mbarrier.arrive(q_empty.index(0), count=1)
    before = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(v_full.index(before), phase)
    clear_hidden_values(vs.index(before), v_full.index(before), phase, stop - 1, 0, kv_len, BN, D)
    acc = warpgroup_mma(gl.convert_layout(p, PL), vs.index(before), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(before), count=1)
    # Numbers of the tile are read again: the loop has no registers for them.
    late = (turn & 1) * 8
    first = read_number(queue, late + 1, 4)
    token = read_number(queue, late + 2, 4)
    q_len = read_number(queue, late + 3, 4)
    finished = True
    if SEGMENT > 0:
        if segment < 0:
            if (stop - 1) // PER_SEGMENT > start // PER_SEGMENT:
                base, row_sum, acc = add_to(
                    states, own_program() * 2 + PART, gl.arange(0, ROWS, RS) + zero(D), base, row_sum, acc, D, OL, RO
                )
        else:
            kv_len = read_number(queue, late + 4, 4)
            segments = (gl.minimum(kv_len, kv_len - q_len + first + QUERIES) + SEGMENT - 1) // SEGMENT
            if segments > 1:
                finished, base, row_sum, acc = hand_over(
                    states, arrivals_ptr, queue, late, head, segments, segment, base, row_sum, acc,
                    PART, HEADS, D, OL, RS, RO,
                )  # fmt: skip
    if finished:
        write_rows(
            out_ptr, lse_ptr, sinks_ptr, v_scales_ptr, num_tokens, stride_out_token, stride_out_head,
            head, first, token, q_len, base, row_sum, acc,
            PART, GQA_GROUP, DIM, D, WANTS_LSE, HAS_SINKS, SCALES, DTYPE if not NARROWS else qs.dtype, RS, RO,
        )  # fmt: skip
    return step + 1


@gluon.jit
def consume(
    out_ptr, lse_ptr, sinks_ptr, arrivals_ptr, acc_ptr, base_ptr, sum_ptr, k_scales_ptr, v_scales_ptr,
    scale_log2, cap_log2, num_tokens, stride_out_token, stride_out_head, qs, ks, vs, queue,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    PART: gl.constexpr, HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr,
    CAP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr, SCALES: gl.constexpr, Q_REGISTERS: gl.constexpr,
    SEGMENT: gl.constexpr,
):  # fmt: skip
    """Half of a tile's rows, piece by piece."""
    if SCALES:
        # Quantized values: the keys' scale goes to where scores are scaled, the values' scale to the output.
        if CAP:
            cap_log2 = cap_log2 * gl.load(k_scales_ptr)
        else:
            scale_log2 = scale_log2 * gl.load(k_scales_ptr)
    stages = (ks, vs, k_full, k_empty, v_full, v_empty)
    step = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    head, first, q_len, kv_len, segment = read_piece(queue, turn)
    while head >= 0:
        args = (
            out_ptr, lse_ptr, sinks_ptr, arrivals_ptr, (acc_ptr, base_ptr, sum_ptr), v_scales_ptr,
            scale_log2, cap_log2, num_tokens, stride_out_token, stride_out_head, qs, stages, queue, q_empty,
            head, first, q_len, kv_len, segment, step, turn,
        )  # fmt: skip
        start, stop = piece_keys(first, q_len, kv_len, segment, 128 // GQA_GROUP, BN, SEGMENT)
        if PART == 1 and first + 64 // GQA_GROUP >= q_len:
            # Few new tokens leave this half of a tile without rows.
            step = pass_over(k_full, k_empty, v_full, v_empty, stop - start, step, STAGES)
            mbarrier.arrive(q_empty.index(0), count=1)
        elif (segment >= 0) | (stop - start > SEGMENT // BN):
            step = _attend_piece(
                *args, PART, HEADS, GQA_GROUP, DIM, D, CAP, BN, STAGES, WANTS_LSE, HAS_SINKS, SCALES,
                Q_REGISTERS, SEGMENT,
            )  # fmt: skip
        else:
            # A copy without segments: what is executed first lies together, in memory that a launch finds cold.
            step = _attend_piece(
                *args, PART, HEADS, GQA_GROUP, DIM, D, CAP, BN, STAGES, WANTS_LSE, HAS_SINKS, SCALES,
                Q_REGISTERS, 0,
            )  # fmt: skip
        turn += 1
        mbarrier.wait(q_full.index(0), turn & 1)
        head, first, q_len, kv_len, segment = read_piece(queue, turn)
