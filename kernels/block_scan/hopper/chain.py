"""The chain of a scan: one warp group brings the state from block to block and writes it where it is left.

Values are rows here, keys or tokens columns: what one product returns is the left factor of the next one, and stays in
registers. Nothing on the chain waits for another warp but for the block itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.block_scan.hopper.feed import ADDED, BETA, NUM_VECTORS, READ, REMAINS
from kernels.block_scan.hopper.rows import clear_tail, row_of_program
from kernels.block_scan.plan import GRID_TOKENS
from kernels.hopper.barriers import thread_barrier
from kernels.hopper.registers import opaque_zero_of

_GRID = gl.constexpr(GRID_TOKENS)


@gluon.jit
def without_tail(columns, count, TOKENS: gl.constexpr):
    """Returns `columns` with zeros from `count` on. The mask is computed here, to take no registers elsewhere."""
    token = gl.arange(0, _GRID, TOKENS) + opaque_zero_of(count)
    return gl.where((token < count)[None, :], columns, 0.0)


@gluon.jit
def state_places(head, DK: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr, BY_VALUE: gl.constexpr, L: gl.constexpr):
    """Returns where [BV, DK] elements lie in a slot; made anew at each call, as 64 addresses would fill the registers
    between them."""
    head += opaque_zero_of(head)
    e = gl.program_id(1) * BV + gl.arange(0, BV, gl.SliceLayout(1, L))
    d = gl.arange(0, DK, gl.SliceLayout(0, L))
    place = e[:, None] * DK + d[None, :] if BY_VALUE else d[None, :] * DV + e[:, None]
    return head * (DK * DV) + place


@gluon.jit
def load_state(states_ptr, working_ptr, restore_ptr, fresh_ptr, row, stride_slot, place):
    """Returns the state that a row begins with."""
    working = gl.load(working_ptr + row).to(gl.int64)
    restore = gl.load(restore_ptr + row).to(gl.int64)
    source = gl.where(restore > 0, restore, working)
    source = gl.where(gl.load(fresh_ptr + row) != 0, 0, source)
    return gl.load(states_ptr + source * stride_slot + place, mask=(place >= 0) & (source > 0), other=0.0)


@gluon.jit
def pass_states(
    states_ptr, remains_ptr, cu_blocks_ptr, blocks_ptr, leave_ptr, working_ptr, restore_ptr, fresh_ptr, rolling_ptr,
    stride_slot, ks, vs, inverses, kepts, vectors, states, errors, full, empty, states_full, states_empty, errors_full,
    errors_empty,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr,
    HAS_INVERSES: gl.constexpr, HAS_CHANNELS: gl.constexpr, BY_VALUE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """For each block: `states` gets the state before it, `errors` with inverses what its tokens write."""
    DTYPE: gl.constexpr = ks.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DK, 16])
    TL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _GRID, 16])
    S_LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TL, k_width=2)
    T_LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SL, k_width=2)
    TOKENS: gl.constexpr = gl.SliceLayout(0, TL)
    row, head, begin, end, first, count, stop = row_of_program(cu_blocks_ptr, blocks_ptr, working_ptr, HEADS)
    place = state_places(head, DK, DV, BV, BY_VALUE, SL)
    state = load_state(states_ptr, working_ptr, restore_ptr, fresh_ptr, row, stride_slot, place)
    no_sums = gl.zeros([BV, _GRID], gl.float32, TL)
    no_state = gl.zeros([BV, DK], gl.float32, SL)
    narrow = state.to(DTYPE)
    for i in range(end - begin):
        slot = i % STAGES
        turn = i % 2
        at = slot * NUM_VECTORS
        left = gl.load(leave_ptr + begin + i).to(gl.int64)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        key = kepts.index(slot) if HAS_CHANNELS else ks.index(slot)
        clear_tail(key, count, DK)
        if HAS_INVERSES:
            read = warpgroup_mma(
                gl.convert_layout(narrow, S_LEFT), ks.index(slot).permute((1, 0)), no_sums, use_acc=False, is_async=True
            )
        # What needs no product is made while the first one runs: the assembler moves nothing over these waits.
        mbarrier.wait(states_empty.index(turn), ((i // 2) & 1) ^ 1)
        wide = vs.index(slot).permute((1, 0)).load(TL).to(gl.float32)
        if HAS_INVERSES:
            wide = wide * vectors.index(at + BETA).load(TOKENS)[None, :]
            decay = (no_sums + 1.0) * vectors.index(at + READ).load(TOKENS)[None, :]
        states.index(turn).store(narrow)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(states_full.index(turn), count=1)
        if HAS_INVERSES:
            mbarrier.wait(errors_empty.index(turn), ((i // 2) & 1) ^ 1)
            read = warpgroup_mma_wait(0, deps=[read])
            wide = gl.fma(read, decay, wide)
            if count < _GRID:
                wide = without_tail(wide, count, TOKENS)
            solved = warpgroup_mma(
                gl.convert_layout(wide.to(DTYPE), S_LEFT), inverses.index(slot).permute((1, 0)), no_sums,
                use_acc=False, is_async=True,
            )  # fmt: skip
            if not HAS_CHANNELS:
                part = vectors.index(at + ADDED).load(TOKENS)
            wide = warpgroup_mma_wait(0, deps=[solved])
        else:
            part = vectors.index(at + ADDED).load(TOKENS)
        if count < _GRID:
            wide = without_tail(wide, count, TOKENS)
        given = wide
        if not HAS_CHANNELS:
            given = wide * part[None, :]
        added = warpgroup_mma(gl.convert_layout(given.to(DTYPE), T_LEFT), key, no_state, use_acc=False, is_async=True)
        if HAS_INVERSES:
            errors.index(turn).store(wide.to(DTYPE))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(errors_full.index(turn), count=1)
        if HAS_CHANNELS:
            of_block = ((begin + i).to(gl.int64) * (HEADS // GROUP) + head // GROUP) * DK
            remains = gl.load(remains_ptr + of_block + gl.arange(0, DK, gl.SliceLayout(0, SL)))[None, :]
        else:
            remains = vectors.index(at + REMAINS).load(gl.SliceLayout(1, SL))[:, None]
        added = warpgroup_mma_wait(0, deps=[added])
        thread_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        state = state * remains + added
        narrow = state.to(DTYPE)
        if left > 0:
            gl.store(states_ptr + left * stride_slot + state_places(head + i * 0, DK, DV, BV, BY_VALUE, SL), state)
        first += count
        count = gl.minimum(stop - first, _GRID)
    working = gl.load(working_ptr + row).to(gl.int64)
    if working > 0:
        rolling = gl.load(rolling_ptr + row).to(gl.int64)
        place = state_places(head, DK, DV, BV, BY_VALUE, SL)
        thread_barrier()  # a row without tokens reads and writes its state alike
        if rolling > 0:
            gl.store(states_ptr + rolling * stride_slot + place, state)
        gl.store(states_ptr + working * stride_slot + place, state)
