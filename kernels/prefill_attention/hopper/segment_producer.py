"""Fills shared memory for the consumers as `producer` does, piece by piece."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.work_queue import draw, leave, write_item
from kernels.prefill_attention.hopper.producer import copy_tile, widen_tile
from kernels.prefill_attention.hopper.segment_pieces import piece, piece_keys, read_piece


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, tables_ptr, stride_tables_seq, records_ptr, units_ptr, count_ptr, num_units_ptr,
    num_tokens, k_page_rows, v_page_rows, qs, ks, vs, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    PACKED: gl.constexpr, PADDED: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    SEGMENT: gl.constexpr,
):  # fmt: skip
    """Streams Q, K and V of all pieces of this program, as far ahead as the stages allow."""
    SIZE: gl.constexpr = ks.dtype.primitive_bitwidth // 8
    if not PACKED:
        gl.static_assert(64 % GQA_GROUP == 0)
    units = gl.load(num_units_ptr)
    split = units > 0
    num_items = gl.where(split, units, gl.load(count_ptr)) * HEADS
    step = 0
    turn = 0
    place = gl.program_id(0)
    head, seq, first, token, q_len, kv_len, segment, before, number = piece(
        records_ptr, units_ptr, split, place, num_items, HEADS
    )
    while place < num_items:
        start, stop = piece_keys(first, q_len, kv_len, segment, 128 // GQA_GROUP, BN, SEGMENT)
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        write_item(queue, (turn & 1) * 8, (head, first, token, q_len, kv_len, segment, before, number))
        mbarrier.arrive(q_full.index(0), count=1)
        mbarrier.expect(q_full.index(0), 128 * D * 2)
        for part in gl.static_range(2):
            target = qs.index(part)
            if PACKED:
                row = (head * num_tokens + token + first) * GQA_GROUP + part * 64
                tma.async_copy_global_to_shared(q_desc, [row, 0], q_full.index(0), target)
            else:
                where = [token + first + part * (64 // GQA_GROUP), head * GQA_GROUP, 0]
                tma.async_copy_global_to_shared(q_desc, where, q_full.index(0), target)
        # The next tile's record is on its way while this one's keys are.
        place = draw(count_ptr + 1, gl.num_programs(0))
        nhead, nseq, nfirst, ntoken, nq_len, nkv_len, nsegment, nbefore, nnumber = piece(
            records_ptr, units_ptr, split, place, num_items, HEADS
        )
        table_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        high = (kv_len - 1) // PAGE
        row = head * PAGE if HND else 0
        # With zeros behind the head dim a head is an axis of its own, else a range of columns.
        k_column = 0 if HND else head if PADDED else head * D
        v_column = 0 if HND else head if PADDED else head * D
        for tile in range(start, stop):
            slot = step % STAGES
            phase = (step // STAGES) & 1
            copy_tile(
                k_desc, ks, k_full, k_empty, slot, phase, table_ptr, tile, 0, high, k_page_rows, row, k_column,
                PAGE, BN, BN * D * SIZE, PADDED,
            )  # fmt: skip
            copy_tile(
                v_desc, vs, v_full, v_empty, slot, phase, table_ptr, tile, 0, high, v_page_rows, row, v_column,
                PAGE, BN, BN * D * SIZE, PADDED,
            )  # fmt: skip
            step += 1
        turn += 1
        head, seq, first, token, q_len, kv_len = nhead, nseq, nfirst, ntoken, nq_len, nkv_len
        segment, before, number = nsegment, nbefore, nnumber
    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
    write_item(queue, (turn & 1) * 8, (head * 0 - 1, first, token, q_len, kv_len, segment))
    mbarrier.arrive(q_full.index(0), count=2)
    leave(count_ptr + 1, gl.num_programs(0))


@gluon.jit
def widen(
    queue, q_full, q_empty, k_quantized, v_quantized,
    k_quantized_full, k_quantized_empty, v_quantized_full, v_quantized_empty,
    ks, vs, k_full, k_empty, v_full, v_empty,
    GQA_GROUP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """Dequantizes all key tiles of this program, stage by stage."""
    step = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    head, first, q_len, kv_len, segment = read_piece(queue, turn)
    thread_barrier()
    mbarrier.arrive(q_empty.index(0), count=1)
    while head >= 0:
        start, stop = piece_keys(first, q_len, kv_len, segment, 128 // GQA_GROUP, BN, SEGMENT)
        for _tile in range(start, stop):
            slot = step % STAGES
            phase = (step // STAGES) & 1
            widen_tile(k_quantized, k_quantized_full, k_quantized_empty, ks, k_full, k_empty, slot, phase, BN)
            widen_tile(v_quantized, v_quantized_full, v_quantized_empty, vs, v_full, v_empty, slot, phase, BN)
            step += 1
        turn += 1
        mbarrier.wait(q_full.index(0), turn & 1)
        head, first, q_len, kv_len, segment = read_piece(queue, turn)
        thread_barrier()
        mbarrier.arrive(q_empty.index(0), count=1)
