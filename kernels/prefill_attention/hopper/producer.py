"""Fills shared memory for the consumers: one warp streams boxes of queries and pages, four dequantize fp8 tiles.

Pages of a key tile go as one box each into rows of one wgmma operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.hopper.barriers import thread_barrier
from kernels.hopper.work_queue import draw, leave, write_item
from kernels.prefill_attention.hopper.tiles import item_at, key_tiles, read_tile


@gluon.jit
def copy_tile(
    desc, stages, full, empty, slot, phase, table_ptr, tile, low, high, page_rows, row, column,
    PAGE: gl.constexpr, BN: gl.constexpr, BYTES: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """One key tile into a stage; page ids before and behind the visible keys are not read."""
    ROWS: gl.constexpr = PAGE if PAGE < BN else BN
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    for part in gl.static_range(BN // ROWS):
        key = tile * BN + part * ROWS
        page = gl.load(table_ptr + gl.minimum(gl.maximum(key // PAGE, low), high))
        target = stages.index(slot).slice(part * ROWS, ROWS, 0)
        slots = page * page_rows + row + key % PAGE
        if PADDED:
            tma.async_copy_global_to_shared(desc, [slots, column, 0], full.index(slot), target)
        else:
            tma.async_copy_global_to_shared(desc, [slots, column], full.index(slot), target)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, tables_ptr, stride_tables_seq, records_ptr, count_ptr, num_tokens, k_page_rows, v_page_rows,
    qs, ks, vs, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    PACKED: gl.constexpr, PADDED: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Streams Q, K and V of all tiles of this program, as far ahead as the stages allow."""
    SIZE: gl.constexpr = ks.dtype.primitive_bitwidth // 8
    if not PACKED:
        gl.static_assert(64 % GQA_GROUP == 0)
    step = 0
    turn = 0
    place = gl.program_id(0)
    half, head, seq, first, token, q_len, kv_len = item_at(place, records_ptr, count_ptr, HEADS, GQA_GROUP, HALVES)
    while half < 2:
        lowest, start, stop = key_tiles(first, half, q_len, kv_len, GQA_GROUP, WINDOW, BN)
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        write_item(queue, 0, (head, first, token, q_len, kv_len, half))
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
        nhalf, nhead, nseq, nfirst, ntoken, nq_len, nkv_len = item_at(
            place, records_ptr, count_ptr, HEADS, GQA_GROUP, HALVES
        )
        table_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        low = lowest // PAGE
        high = (kv_len - 1) // PAGE
        row = head * PAGE if HND else 0
        # With zeros behind the head dim a head is an axis of its own, else a range of columns.
        k_column = 0 if HND else head if PADDED else head * D
        v_column = 0 if HND else head if PADDED else head * D
        for tile in range(start, stop):
            slot = step % STAGES
            phase = (step // STAGES) & 1
            copy_tile(
                k_desc, ks, k_full, k_empty, slot, phase, table_ptr, tile, low, high, k_page_rows, row, k_column,
                PAGE, BN, BN * D * SIZE, PADDED,
            )  # fmt: skip
            copy_tile(
                v_desc, vs, v_full, v_empty, slot, phase, table_ptr, tile, low, high, v_page_rows, row, v_column,
                PAGE, BN, BN * D * SIZE, PADDED,
            )  # fmt: skip
            step += 1
        turn += 1
        half, head, seq, first, token, q_len, kv_len = nhalf, nhead, nseq, nfirst, ntoken, nq_len, nkv_len
    mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
    write_item(queue, 0, (head * 0 - 1, first, token, q_len, kv_len, head * 0 - 1))
    mbarrier.arrive(q_full.index(0), count=2)
    leave(count_ptr + 1, gl.num_programs(0))


@gluon.jit
def widen_tile(tiles, quantized_full, quantized_empty, widened, full, empty, slot, phase, BN: gl.constexpr):
    """Converts one fp8 tile to fp16, which holds every e4m3 value."""
    # Eight elements a thread: sixteen bytes of fp16 next to the next thread's, so that stores meet in no bank.
    CL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    mbarrier.wait(quantized_full.index(slot), phase)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    PARTS: gl.constexpr = 4
    for part in gl.static_range(PARTS):
        tile = tiles.index(slot).slice(part * (BN // PARTS), BN // PARTS, 0).load(CL)
        widened.index(slot).slice(part * (BN // PARTS), BN // PARTS, 0).store(tile.to(widened.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(quantized_empty.index(slot), count=1)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def widen(
    queue, q_full, q_empty, k_quantized, v_quantized,
    k_quantized_full, k_quantized_empty, v_quantized_full, v_quantized_empty,
    ks, vs, k_full, k_empty, v_full, v_empty,
    GQA_GROUP: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Dequantizes all key tiles of this program, stage by stage."""
    step = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    head, first, _token, q_len, kv_len, half = read_tile(queue, HALVES)
    thread_barrier()
    mbarrier.arrive(q_empty.index(0), count=1)
    while head >= 0:
        _lowest, start, stop = key_tiles(first, half, q_len, kv_len, GQA_GROUP, WINDOW, BN)
        for _tile in range(start, stop):
            slot = step % STAGES
            phase = (step // STAGES) & 1
            widen_tile(k_quantized, k_quantized_full, k_quantized_empty, ks, k_full, k_empty, slot, phase, BN)
            widen_tile(v_quantized, v_quantized_full, v_quantized_empty, vs, v_full, v_empty, slot, phase, BN)
            step += 1
        turn += 1
        mbarrier.wait(q_full.index(0), turn & 1)
        head, first, _token, q_len, kv_len, half = read_tile(queue, HALVES)
        thread_barrier()
        mbarrier.arrive(q_empty.index(0), count=1)
