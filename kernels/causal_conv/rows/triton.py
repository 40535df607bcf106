"""Rows of causal_conv in Triton; programs of tiles make the outputs that need no state."""

import triton
import triton.language as tl

from kernels.launches import allow_next_launch_and_wait
from kernels.state_slots.triton import slots_of_row


@triton.jit
def columns_after(
    tokens, x_ptr, states_ptr, begin, source, c, ok, stride_x, stride_slot, C: tl.constexpr, CARRIED: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Returns the state of a row after `tokens` of its tokens, [PADDED, channels], and where in a slot it goes."""
    i = tl.arange(0, PADDED)[:, None]
    place = tokens + i
    ok = ok[None, :] & (i < CARRIED)
    carried = tl.load(
        states_ptr + source * stride_slot + place * C + c[None, :],
        mask=ok & (place < CARRIED) & (source > 0),
        other=0.0,
    )
    at = (begin + place - CARRIED) * stride_x + c[None, :]
    new = tl.load(x_ptr + at, mask=ok & (place >= CARRIED), other=0.0)
    return tl.where(place < CARRIED, carried, new), i * C + c[None, :], ok


@triton.jit
def load_bias(bias_ptr, c, ok, HAS_BIAS: tl.constexpr):
    bias = tl.zeros_like(c).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=ok, other=0.0).to(tl.float32)
    return bias


@triton.jit
def load_taps(weight_ptr, c, ok, D_CONV: tl.constexpr, PACKED: tl.constexpr):
    """Returns D_CONV tensors, the channels' weights in fp32; PACKED: those of a channel are read as one integer."""
    BITS: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth
    taps = ()
    if PACKED:
        WORD: tl.constexpr = tl.int64 if BITS * D_CONV == 64 else tl.int32
        PART: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
        word = tl.load(weight_ptr.to(tl.pointer_type(WORD), bitcast=True) + c, mask=ok, other=0)
        for tap in tl.static_range(D_CONV):
            part = (word >> (BITS * tap)).to(PART)
            taps += (part.to(weight_ptr.dtype.element_ty, bitcast=True).to(tl.float32),)  # type: ignore[assignment]
    else:
        for tap in tl.static_range(D_CONV):
            taps += (tl.load(weight_ptr + c * D_CONV + tap, mask=ok, other=0.0).to(tl.float32),)  # type: ignore
    return taps


@triton.jit
def load_constants(
    weight_ptr, bias_ptr, c, ok,
    D_CONV: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Returns the channels' taps and bias, which are loaded while the launch before this one ends; waits for that."""
    taps, bias = load_taps(weight_ptr, c, ok, D_CONV, PACKED), load_bias(bias_ptr, c, ok, HAS_BIAS)
    allow_next_launch_and_wait(OVERLAPS)
    return taps, bias


@triton.jit
def activated(total, SILU: tl.constexpr):
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def leave_columns(
    x_ptr, states_ptr, cu_seqlens_ptr, working_ptr, restore_ptr, fresh_ptr,
    leave_row_ptr, leave_tokens_ptr, leave_slot_ptr, stride_x, stride_slot,
    C: tl.constexpr, CARRIED: tl.constexpr, PADDED: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One snapshot's columns of BLOCK_C channels."""
    allow_next_launch_and_wait(OVERLAPS)
    entry = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    slot = tl.load(leave_slot_ptr + entry).to(tl.int64)
    row = tl.load(leave_row_ptr + entry)
    tokens = tl.load(leave_tokens_ptr + entry)
    if slot > 0:
        source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
        begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
        if working > 0:
            columns, at, is_column = columns_after(
                tokens, x_ptr, states_ptr, begin, source, c, ok, stride_x, stride_slot, C, CARRIED, PADDED
            )
            tl.store(states_ptr + slot * stride_slot + at, columns, mask=is_column)


@triton.jit
def weighted(columns, taps, bias, FIRST: tl.constexpr, D_CONV: tl.constexpr):
    """Returns the sum of D_CONV columns from FIRST on, oldest first, each times its tap."""
    total = bias
    for tap in tl.static_range(D_CONV):
        total = tl.fma(columns[FIRST + tap].to(tl.float32), taps[tap], total)
    return total


@triton.jit
def convolve_one(
    token, source, working, rolling, taps, bias, x_ptr, out_ptr, states_ptr, c, ok, stride_x, stride_slot,
    C: tl.constexpr, D_CONV: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The output and the new state of a row of one token: what convolve_row makes, each column loaded once."""
    is_real = ok & (working > 0)
    window = ()
    for tap in tl.static_range(D_CONV - 1):
        at = states_ptr + source * stride_slot + tap * C + c
        window += (tl.load(at, mask=is_real & (source > 0), other=0.0),)  # type: ignore[assignment]
    window += (tl.load(x_ptr + token * stride_x + c, mask=is_real, other=0.0),)  # type: ignore[assignment]
    total = tl.where(working > 0, activated(weighted(window, taps, bias, 0, D_CONV), SILU), 0.0)
    tl.store(out_ptr + token * C + c, total.to(out_ptr.dtype.element_ty), mask=ok)
    tl.debug_barrier()  # some thread may write what another one reads
    for tap in tl.static_range(D_CONV - 1):
        at = states_ptr + tap * C + c
        tl.store(at + working * stride_slot, window[tap + 1], mask=is_real)
        tl.store(at + rolling * stride_slot, window[tap + 1], mask=is_real & (rolling > 0))


@triton.jit
def convolve_row(
    begin, length, source, working, rolling, taps, bias, x_ptr, out_ptr, states_ptr, c, ok, stride_x, stride_slot,
    C: tl.constexpr, D_CONV: tl.constexpr, PADDED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A row's first outputs, then its new state. All columns are on their way before the first is used: one after the
    other, 16 tokens of 12,288 channels took 7.5 us of an H200."""
    CARRIED: tl.constexpr = D_CONV - 1
    is_real = ok & (working > 0)
    window = ()
    for place in tl.static_range(CARRIED):
        at = states_ptr + source * stride_slot + place * C + c
        window += (tl.load(at, mask=is_real & (source > 0), other=0.0),)  # type: ignore[assignment]
    for j in tl.static_range(CARRIED):
        at = x_ptr + (begin + j) * stride_x + c
        window += (tl.load(at, mask=is_real & (j < length), other=0.0),)  # type: ignore[assignment]
    columns, at, is_column = columns_after(
        length, x_ptr, states_ptr, begin, source, c, is_real, stride_x, stride_slot, C, CARRIED, PADDED
    )
    for j in tl.static_range(CARRIED):
        total = tl.where(working > 0, activated(weighted(window, taps, bias, j, D_CONV), SILU), 0.0)
        tl.store(out_ptr + (begin + j) * C + c, total.to(out_ptr.dtype.element_ty), mask=ok & (j < length))
    tl.debug_barrier()  # some thread may write what another one reads
    tl.store(states_ptr + working * stride_slot + at, columns, mask=is_column)
    tl.store(states_ptr + rolling * stride_slot + at, columns, mask=is_column & (rolling > 0))
