"""prefill_attention in Gluon for Hopper: one producer warp, two consumer warpgroups, a persistent list of tiles.

Knows nothing of chunks. Key tiles start at absolute multiples of BN, every tile passes through one loop body, and a
tile that a row does not see leaves that row's state bit for bit as it was: so a token's result does not depend on how
its prompt was cut, on its place in the tile or on who shares its batch.

    producer     Q of the next tile; K, V of key tile i: one TMA box for each page, into rows of one wgmma operand
    consumers    64 rows each:   QK(i) and PV(i - 1) run on the tensor cores, while softmax(i - 1) becomes softmax(i)

    rows of a tile: BM // GROUP queries, each with its GROUP query heads, so that they share the tile's keys
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import AttentionSpec
from kernels.layout import KvLayout
from kernels.prefill_attention.hopper import TILE_ROWS, key_block, padded_dim, row_elements

LOG2_E = 1.4426950408889634

# Renamed between Triton 3.6 and 3.7.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _rounds(count_ptr, HEADS: gl.constexpr):
    """How many tiles this program computes: programs take turns, every other turn in reverse order."""
    total = gl.load(count_ptr) * HEADS
    programs = gl.num_programs(0)
    turns = total // programs
    return turns + (_place(turns) < total).to(gl.int32), total


@gluon.jit
def _place(turn):
    """The tile that this program computes in a turn. Reversing evens out lists that are sorted by length."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return turn * programs + gl.where((turn & 1) == 1, programs - 1 - pid, pid)


@gluon.jit
def _record(records_ptr, turn, total, HEADS: gl.constexpr):
    """(kv head, seq, first query, first token, queries of the sequence, keys of the sequence) of a turn's tile."""
    place = gl.minimum(_place(turn), total - 1)
    at = records_ptr + (place // HEADS) * 8
    return place % HEADS, gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def _key_tiles(first, q_len, kv_len, QUERIES: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr):
    """(first key that a row of the tile sees, first key tile, tile behind the last one)."""
    cached = kv_len - q_len
    lowest = 0
    if WINDOW > 0:
        lowest = gl.maximum(cached + first - WINDOW + 1, 0)
    stop = gl.minimum(kv_len, cached + first + QUERIES)
    return lowest, lowest // BN, (stop + BN - 1) // BN


@gluon.jit
def _copy_tile(
    desc, stages, full, empty, slot, phase, table_ptr, tile, low, high, page_rows, row, head,
    PAGE: gl.constexpr, BN: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """One key tile into a stage; page ids before and behind the visible keys are not read."""
    ROWS: gl.constexpr = PAGE if PAGE < BN else BN
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    for part in gl.static_range(BN // ROWS):
        key = tile * BN + part * ROWS
        page = gl.load(table_ptr + gl.minimum(gl.maximum(key // PAGE, low), high))
        target = stages.index(slot).slice(part * ROWS, ROWS, 0)
        where = [page * page_rows + row + key % PAGE, head, 0]
        tma.async_copy_global_to_shared(desc, where, full.index(slot), target)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, tables_ptr, stride_tables_seq, records_ptr, count_ptr, num_tokens, k_page_rows, v_page_rows,
    qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr, HND: gl.constexpr,
    PACKED: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Streams Q, K and V of all tiles of this program, as far ahead as the stages allow."""
    SIZE: gl.constexpr = ks.dtype.primitive_bitwidth // 8
    if not PACKED:
        gl.static_assert(64 % GROUP == 0)
    rounds, total = _rounds(count_ptr, HEADS)
    step = 0
    for turn in range(rounds):
        head, seq, first, token, q_len, kv_len = _record(records_ptr, turn, total, HEADS)
        lowest, start, stop = _key_tiles(first, q_len, kv_len, 128 // GROUP, WINDOW, BN)
        stage = turn % Q_STAGES
        mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), 128 * D * 2)
        for part in gl.static_range(2):
            target = qs.index(stage * 2 + part)
            if PACKED:
                row = (head * num_tokens + token + first) * GROUP + part * 64
                tma.async_copy_global_to_shared(q_desc, [row, 0], q_full.index(stage), target)
            else:
                where = [token + first + part * (64 // GROUP), head * GROUP, 0]
                tma.async_copy_global_to_shared(q_desc, where, q_full.index(stage), target)
        table_ptr = tables_ptr + seq.to(gl.int64) * stride_tables_seq
        low = lowest // PAGE
        high = (kv_len - 1) // PAGE
        row = head * PAGE if HND else 0
        column = 0 if HND else head
        for tile in range(start, stop):
            slot = step % STAGES
            phase = (step // STAGES) & 1
            _copy_tile(
                k_desc, ks, k_full, k_empty, slot, phase, table_ptr, tile, low, high, k_page_rows, row, column,
                PAGE, BN, BN * D * SIZE,
            )  # fmt: skip
            _copy_tile(
                v_desc, vs, v_full, v_empty, slot, phase, table_ptr, tile, low, high, v_page_rows, row, column,
                PAGE, BN, BN * DV * SIZE,
            )  # fmt: skip
            step += 1


@gluon.jit
def _visible(scores, tile, position, nfull, last_low, WINDOW: gl.constexpr, BN: gl.constexpr, SL: gl.constexpr):
    """Scores with what a row does not see at -1e30; tiles that all rows see wholly pass as they are."""
    if WINDOW > 0:
        if (tile >= nfull) | (tile * BN < last_low):
            key = (tile * BN + gl.arange(0, BN, gl.SliceLayout(0, SL)))[None, :]
            seen = (key <= position[:, None]) & (key > position[:, None] - WINDOW)
            scores = gl.where(seen, scores, -1.0e30)
    else:
        if tile >= nfull:
            key = (tile * BN + gl.arange(0, BN, gl.SliceLayout(0, SL)))[None, :]
            scores = gl.where(key <= position[:, None], scores, -1.0e30)
    return scores


@gluon.jit
def _weigh(scores, peak, base, scale):
    """(peak, base, weights, decay): the largest score so far, that score scaled, and how much older sums shrink.

    The scale is folded into exp2. Bases are kept, not made again from peaks: where the peak stays, decay is exactly 1.
    """
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    new_base = new_peak * scale
    factor = gl.zeros_like(scores) + scale
    weights = gl.exp2(gl.fma(scores, factor, gl.expand_dims(-new_base, 1) + gl.zeros_like(scores)))
    return new_peak, new_base, weights, gl.exp2(base - new_base)


@gluon.jit
def _capped(scores, cap_log2, CAP: gl.constexpr):
    """tanh(scores * c) as 1 - 2 / (exp(2 c scores) + 1): the hardware's own tanh is too coarse for a logit."""
    if CAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * cap_log2) + 1.0)
    return scores


@gluon.jit
def _clear_hidden_values(values, full, phase, tile, lowest, kv_len, BN: gl.constexpr):
    """Zeros in rows that hold no key of the sequence: their weight is 0, and 0 * NaN would not be.

    Only a sequence's last tile has such rows, and the first one of a window. Both consumers clear them, each before its
    own product; they write the same numbers.
    """
    if ((tile + 1) * BN > kv_len) | (tile * BN < lowest):
        CL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        key = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, CL))
        ok = (key >= lowest) & (key < kv_len)
        mbarrier.wait(full, phase)
        values.store(gl.where(ok[:, None], values.load(CL), 0.0))
        fence_async_shared()
        _barrier()


@gluon.jit
def _consume(
    out_ptr, lse_ptr, sinks_ptr, records_ptr, count_ptr, scale_log2, cap_log2, num_tokens,
    stride_out_token, stride_out_head, qs, ks, vs,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    PART: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Half of a tile's rows: 64 of them in one warpgroup."""
    ROWS: gl.constexpr = 64
    QUERIES: gl.constexpr = 128 // GROUP
    LOG2_E: gl.constexpr = 1.4426950408889634
    LN_2: gl.constexpr = 0.6931471805599453
    DTYPE: gl.constexpr = qs.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    RS: gl.constexpr = gl.SliceLayout(1, SL)
    RO: gl.constexpr = gl.SliceLayout(1, OL)
    row_s = PART * ROWS + gl.arange(0, ROWS, RS)
    zeros = gl.zeros([ROWS, BN], gl.float32, SL)
    rounds, total = _rounds(count_ptr, HEADS)
    step = 0
    head, _seq, first, token, q_len, kv_len = _record(records_ptr, 0, total, HEADS)
    for turn in range(rounds):
        nhead, _nseq, nfirst, ntoken, nq_len, nkv_len = _record(records_ptr, turn + 1, total, HEADS)
        cached = kv_len - q_len
        lowest, start, stop = _key_tiles(first, q_len, kv_len, QUERIES, WINDOW, BN)
        nfull = (cached + first + 1) // BN
        last_low = cached + first + QUERIES - WINDOW
        position = cached + first + row_s // GROUP
        peak = gl.full([ROWS], -1.0e20, gl.float32, RS)
        base = gl.zeros([ROWS], gl.float32, RS)
        sums = gl.full([ROWS], 0.0, gl.float32, RS)
        acc = gl.zeros([ROWS, DV], gl.float32, OL)
        stage = turn % Q_STAGES
        q = qs.index(stage * 2 + PART)
        mbarrier.wait(q_full.index(stage), (turn // Q_STAGES) & 1)
        # The first key tile: there is no earlier one whose values could be added meanwhile.
        slot = step % STAGES
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
        scores = warpgroup_mma(q, ks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(slot), count=1)
        scores = _visible(_capped(scores, cap_log2, CAP), start, position, nfull, last_low, WINDOW, BN, SL)
        peak, base, weights, decay = _weigh(scores, peak, base, scale_log2)
        sums = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(DTYPE), PL)
        if WINDOW > 0:
            _clear_hidden_values(vs.index(slot), v_full.index(slot), (step // STAGES) & 1, start, lowest, kv_len, BN)
        for tile in range(start + 1, stop):
            before = step % STAGES
            before_phase = (step // STAGES) & 1
            step += 1
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            scores = warpgroup_mma(q, ks.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), before_phase)
            acc = warpgroup_mma(p, vs.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(slot), count=1)
            scores = _visible(_capped(scores, cap_log2, CAP), tile, position, nfull, last_low, WINDOW, BN, SL)
            peak, base, weights, decay = _weigh(scores, peak, base, scale_log2)
            sums = gl.fma(sums, decay, gl.sum(weights, 1))
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(decay, RO)[:, None]
            p = gl.convert_layout(weights.to(DTYPE), PL)
        mbarrier.arrive(q_empty.index(stage), count=1)
        before = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(v_full.index(before), phase)
        _clear_hidden_values(vs.index(before), v_full.index(before), phase, stop - 1, lowest, kv_len, BN)
        acc = warpgroup_mma(p, vs.index(before), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before), count=1)
        step += 1

        if HAS_SINKS:
            # Once, behind the last key: the sink has no value, so it only adds to the sum.
            sink = gl.load(sinks_ptr + head * GROUP + row_s % GROUP).to(gl.float32) * LOG2_E
            raised = gl.maximum(base, sink)
            decay = gl.exp2(base - raised)
            sums = gl.fma(sums, decay, gl.exp2(sink - raised))
            acc = acc * gl.convert_layout(decay, RO)[:, None]
            base = raised
        acc = acc * gl.convert_layout(1.0 / sums, RO)[:, None]
        row = PART * ROWS + gl.arange(0, ROWS, RO)
        query = first + row // GROUP
        live = (row < QUERIES * GROUP) & (query < q_len)
        at = (token + query).to(gl.int64) * stride_out_token + (head * GROUP + row % GROUP) * stride_out_head
        d = gl.arange(0, DV, gl.SliceLayout(0, OL))
        gl.store(out_ptr + at[:, None] + d[None, :], acc.to(DTYPE), mask=live[:, None] & (d < DIM)[None, :])
        if WANTS_LSE:
            query_s = first + row_s // GROUP
            live_s = (row_s < QUERIES * GROUP) & (query_s < q_len)
            at_s = (head * GROUP + row_s % GROUP).to(gl.int64) * num_tokens + token + query_s
            gl.store(lse_ptr + at_s, (base + gl.log2(sums)) * LN_2, mask=live_s)
        head, first, token, q_len, kv_len = nhead, nfirst, ntoken, nq_len, nkv_len


@gluon.jit(do_not_specialize=["num_tokens", "stride_tables_seq"])
def attend_tiles(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, sinks_ptr, tables_ptr, records_ptr, count_ptr,
    scale_log2, cap_log2, num_tokens, stride_tables_seq, stride_out_token, stride_out_head, k_page_rows, v_page_rows,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr,
    HND: gl.constexpr, PACKED: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, WANTS_LSE: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Allocates what producer and consumers share, and starts them."""
    DTYPE: gl.constexpr = q_desc.dtype
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    if PACKED:
        q_in = gl.allocate_shared_memory(DTYPE, [2 * Q_STAGES, 64, D], q_desc.layout)
    else:
        q_in = gl.allocate_shared_memory(DTYPE, [2 * Q_STAGES, 64 // GROUP, GROUP, D], q_desc.layout)
    qs = q_in if PACKED else q_in._reinterpret(DTYPE, [2 * Q_STAGES, 64, D], rows)
    k_in = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, 1, D], k_desc.layout)
    v_in = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, 1, DV], v_desc.layout)
    ks = k_in._reinterpret(k_desc.dtype, [STAGES, BN, D], rows)
    vs = v_in._reinterpret(v_desc.dtype, [STAGES, BN, DV], rows)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    # Spelled out twice: a tuple that passes through a variable loses its compile-time constants.
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, lse_ptr, sinks_ptr, records_ptr, count_ptr, scale_log2, cap_log2, num_tokens,
                stride_out_token, stride_out_head, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                0, HEADS, GROUP, DIM, D, DV, WINDOW, CAP, BN, STAGES, Q_STAGES, WANTS_LSE, HAS_SINKS,
            )),
            (_consume, (
                out_ptr, lse_ptr, sinks_ptr, records_ptr, count_ptr, scale_log2, cap_log2, num_tokens,
                stride_out_token, stride_out_head, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                1, HEADS, GROUP, DIM, D, DV, WINDOW, CAP, BN, STAGES, Q_STAGES, WANTS_LSE, HAS_SINKS,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, tables_ptr, stride_tables_seq, records_ptr, count_ptr, num_tokens,
                k_page_rows, v_page_rows, q_in, k_in, v_in, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                HEADS, GROUP, D, DV, PAGE, HND, PACKED, WINDOW, BN, STAGES, Q_STAGES,
            )),
        ],
        [4, 1],
        # Many small pages, or a window's bounds, take more of the producer.
        [240, 24] if PAGE >= 16 and WINDOW == 0 else [232, 40],
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    records: torch.Tensor,
    count: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launches over checked, non-empty arguments and the work list of their lengths."""
    shape, group = spec.shape, spec.group
    block = key_block(shape.dim)
    num_programs = min(_num_multiprocessors(q.device), records.shape[0] * shape.heads)
    scale = spec.softcap if spec.softcap else spec.scale
    with torch.cuda.device_of(q):
        attend_tiles[(num_programs,)](
            _query_descriptor(q, group),
            _page_descriptor(k_pages, spec, block),
            _page_descriptor(v_pages, spec, block),
            out,
            lse if lse is not None else out,
            sinks if sinks is not None else out,
            block_tables,
            records,
            count,
            scale * LOG2_E,
            2.0 * LOG2_E * spec.scale / spec.softcap if spec.softcap else 0.0,
            out.shape[0],
            block_tables.stride(0),
            out.stride(0),
            out.stride(1),
            k_pages.stride(0) // row_elements(spec),
            v_pages.stride(0) // row_elements(spec),
            HEADS=shape.heads,
            GROUP=group,
            DIM=shape.dim,
            D=padded_dim(shape.dim),
            DV=padded_dim(shape.dim),
            PAGE=shape.page_tokens,
            HND=spec.layout is KvLayout.HND,
            PACKED=q.dim() == 4,
            WINDOW=spec.window,
            CAP=spec.softcap > 0.0,
            BN=block,
            STAGES=2,
            Q_STAGES=2 if block == 128 else 1,
            WANTS_LSE=lse is not None,
            HAS_SINKS=sinks is not None,
            num_warps=4,
            # Only what is written as fma is one: copies of the loop's arithmetic round alike.
            enable_fp_fusion=False,
        )


def _query_descriptor(q: torch.Tensor, group: int) -> TensorDescriptor:
    """Boxes of 64 rows: of packed queries as they lie, else of 64 / group tokens with one kv head's query heads.

    Here and below, what a box has beyond the head dim is filled with zeros.
    """
    dim = padded_dim(q.shape[-1])
    if q.dim() == 4:
        rows = q.view(-1, q.shape[3])
        return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [TILE_ROWS // 2, dim], _shared(2))
    box = [TILE_ROWS // 2 // group, group, dim]
    return TensorDescriptor(q, list(q.shape), list(q.stride()), box, _shared(3))


def _page_descriptor(pages: torch.Tensor, spec: AttentionSpec, block: int) -> TensorDescriptor:
    """Pages as rows [slots, heads, dim] (NHD), or as the slots of a page's first head, of its second, ... (HND)."""
    width, shape = row_elements(spec), spec.shape
    rows = ((shape.num_pages - 1) * pages.stride(0) + pages[0].numel()) // width
    box = [min(shape.page_tokens, block), 1, padded_dim(shape.dim)]
    return TensorDescriptor(pages, [rows, width // shape.dim, shape.dim], [width, shape.dim, 1], box, _shared(3))


def _shared(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
