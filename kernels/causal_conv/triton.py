"""causal_conv in Triton: snapshots in a launch of their own, then all outputs and the new states.

Only a row's first d_conv - 1 outputs, its snapshots and its new state read what it carries. One program makes the first
and the last of these, so that none reads a slot that another one has written; programs for tiles of tokens make the
other outputs, from tokens alone. Snapshots go before both.
"""

import torch
import triton
import triton.language as tl

from kernels.addressing import search_levels
from kernels.addressing.triton import sequence_of
from kernels.causal_conv.call import CausalConvCall
from kernels.state_slots.triton import slots_of_row

# Channels of a warp that serves a row: 16 bytes of a column for each of its threads.
ROW_CHANNELS = 256
# Tokens and channels of a program that serves a tile.
TILE_TOKENS = 16
TILE_CHANNELS = 256
# Tokens that are loaded at once where rows begin or end within a tile.
MIXED_TOKENS = 4
# Warps of a program, and of one in a launch of so many elements that it has programs enough: 8,192 tokens of 8,192
# channels on an H200 take about 70 us with two and 73 with four, 2,048 tokens 32 and 25. Either way the bits are the
# same: a channel's chain of sums stays within a thread.
WARPS, WARPS_OF_MANY = 4, 2
MANY_ELEMENTS = 8192 * 8192


@triton.jit
def column(
    place, x_ptr, states_ptr, begin, source, c, ok, stride_x, stride_slot, C: tl.constexpr, CARRIED: tl.constexpr
):
    """Returns column `place` of a row: CARRIED of its state, then its tokens; zeros where it carries none."""
    if place < CARRIED:
        value = tl.load(states_ptr + source * stride_slot + place * C + c, mask=ok & (source > 0), other=0.0)
    else:
        value = tl.load(x_ptr + (begin + place - CARRIED) * stride_x + c, mask=ok, other=0.0)
    return value


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
def activated(total, SILU: tl.constexpr):
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def leave_columns(
    x_ptr, states_ptr, cu_seqlens_ptr, working_ptr, restore_ptr, fresh_ptr,
    leave_row_ptr, leave_tokens_ptr, leave_slot_ptr, stride_x, stride_slot,
    C: tl.constexpr, CARRIED: tl.constexpr, PADDED: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One snapshot's columns of BLOCK_C channels."""
    entry = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    slot = tl.load(leave_slot_ptr + entry).to(tl.int64)
    if slot > 0:
        row = tl.load(leave_row_ptr + entry)
        tokens = tl.load(leave_tokens_ptr + entry)
        source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
        if working > 0:
            begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
            columns, at, is_column = columns_after(
                tokens, x_ptr, states_ptr, begin, source, c, ok, stride_x, stride_slot, C, CARRIED, PADDED
            )
            tl.store(states_ptr + slot * stride_slot + at, columns, mask=is_column)


@triton.jit
def convolve_one(
    row, block, x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, cu_seqlens_ptr,
    working_ptr, restore_ptr, fresh_ptr, rolling_ptr, stride_x, stride_slot,
    C: tl.constexpr, D_CONV: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The output and the new state of a row of one token: what convolve_row makes, each column loaded once."""
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    taps = load_taps(weight_ptr, c, ok, D_CONV, PACKED)
    total = load_bias(bias_ptr, c, ok, HAS_BIAS)
    token = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
    rolling = tl.load(rolling_ptr + row).to(tl.int64)
    is_real = ok & (working > 0)
    window = ()
    for tap in tl.static_range(D_CONV - 1):
        at = states_ptr + source * stride_slot + tap * C + c
        window += (tl.load(at, mask=is_real & (source > 0), other=0.0),)  # type: ignore[assignment]
    window += (tl.load(x_ptr + token * stride_x + c, mask=is_real, other=0.0),)  # type: ignore[assignment]
    for tap in tl.static_range(D_CONV):
        total = tl.fma(window[tap].to(tl.float32), taps[tap], total)
    total = tl.where(working > 0, activated(total, SILU), 0.0)
    tl.store(out_ptr + token * C + c, total.to(out_ptr.dtype.element_ty), mask=ok)
    tl.debug_barrier()  # some thread may write what another one reads
    for tap in tl.static_range(D_CONV - 1):
        at = states_ptr + tap * C + c
        tl.store(at + working * stride_slot, window[tap + 1], mask=is_real)
        tl.store(at + rolling * stride_slot, window[tap + 1], mask=is_real & (rolling > 0))


@triton.jit
def convolve_row(
    row, block, x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, cu_seqlens_ptr,
    working_ptr, restore_ptr, fresh_ptr, rolling_ptr, stride_x, stride_slot,
    C: tl.constexpr, D_CONV: tl.constexpr, PADDED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A row's first outputs, then its new state."""
    CARRIED: tl.constexpr = D_CONV - 1
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + row + 1) - begin).to(tl.int32)
    source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
    bias = load_bias(bias_ptr, c, ok, HAS_BIAS)
    for j in tl.static_range(CARRIED):
        if j < length:
            total = bias
            if working > 0:
                for tap in tl.static_range(D_CONV):
                    value = column(j + tap, x_ptr, states_ptr, begin, source, c, ok, stride_x, stride_slot, C, CARRIED)
                    weight = tl.load(weight_ptr + c * D_CONV + tap, mask=ok, other=0.0)
                    total = tl.fma(value.to(tl.float32), weight.to(tl.float32), total)
                total = activated(total, SILU)
            else:
                total = tl.zeros_like(total)
            tl.store(out_ptr + (begin + j) * C + c, total.to(out_ptr.dtype.element_ty), mask=ok)
    if working > 0:
        rolling = tl.load(rolling_ptr + row).to(tl.int64)
        columns, at, is_column = columns_after(
            length, x_ptr, states_ptr, begin, source, c, ok, stride_x, stride_slot, C, CARRIED, PADDED
        )
        tl.debug_barrier()  # some thread may write what another one reads
        tl.store(states_ptr + working * stride_slot + at, columns, mask=is_column)
        tl.store(states_ptr + rolling * stride_slot + at, columns, mask=is_column & (rolling > 0))


@triton.jit
def convolve_within_row(
    first, x_ptr, weight_ptr, bias_ptr, out_ptr, c, ok, stride_x,
    C: tl.constexpr, D_CONV: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_T tokens of one row, none of them its first ones: each column is loaded once."""
    bias = load_bias(bias_ptr, c, ok, HAS_BIAS)
    weights, window, loaded = (), (), ()
    x_at = x_ptr + first.to(tl.int64) * stride_x + c
    out_at = out_ptr + first.to(tl.int64) * C + c
    for tap in tl.static_range(D_CONV):
        weights += (tl.load(weight_ptr + c * D_CONV + tap, mask=ok, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    for tap in tl.static_range(D_CONV - 1):
        window += (tl.load(x_at + (tap - D_CONV + 1) * stride_x, mask=ok, other=0.0).to(tl.float32),)  # type: ignore
    # All on their way before the first is used: 3.7 TB/s on an H200, and 3.0 with eight at a time.
    for j in tl.static_range(BLOCK_T):
        loaded += (tl.load(x_at + j * stride_x, mask=ok, other=0.0),)  # type: ignore[assignment]
    for j in tl.static_range(BLOCK_T):
        window += (loaded[j].to(tl.float32),)  # type: ignore
        total = bias
        for tap in tl.static_range(D_CONV):
            total = tl.fma(window[tap], weights[tap], total)
        tl.store(out_at + j * C, activated(total, SILU).to(out_ptr.dtype.element_ty), mask=ok)
        window = window[1:]


@triton.jit
def convolve_some(
    token, written, has_state, x_ptr, weight_ptr, bias_ptr, out_ptr, c, ok, stride_x,
    C: tl.constexpr, D_CONV: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Outputs of those tokens of any rows that are to be written; zeros where a row has no state."""
    read = (written & has_state)[:, None] & ok[None, :]
    at = token.to(tl.int64)[:, None] * stride_x + c[None, :]
    total = tl.zeros(at.shape, tl.float32) + load_bias(bias_ptr, c, ok, HAS_BIAS)[None, :]
    for tap in tl.static_range(D_CONV):
        value = tl.load(x_ptr + at + (tap - D_CONV + 1) * stride_x, mask=read, other=0.0)
        weight = tl.load(weight_ptr + c * D_CONV + tap, mask=ok, other=0.0).to(tl.float32)
        total = tl.fma(value.to(tl.float32), tl.zeros_like(total) + weight[None, :], total)
    total = tl.where(has_state[:, None], activated(total, SILU), 0.0)
    out = out_ptr + token.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=written[:, None] & ok[None, :])


@triton.jit
def written_tokens(token, cu_seqlens_ptr, num_rows, num_tokens, D_CONV: tl.constexpr, LEVELS: tl.constexpr):
    """Returns which of these tokens' outputs a tile makes, which lie behind the last row, and the others' rows."""
    row, begin = sequence_of(token, cu_seqlens_ptr, num_rows, LEVELS)
    is_behind = token >= tl.load(cu_seqlens_ptr + num_rows)
    return (token < num_tokens) & (is_behind | (token - begin >= D_CONV - 1)), is_behind, row


@triton.jit
def convolve_tile(
    first, block, x_ptr, weight_ptr, bias_ptr, out_ptr, cu_seqlens_ptr, working_ptr, num_rows, num_tokens, stride_x,
    C: tl.constexpr, D_CONV: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, MIXED_T: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_T tokens of any rows, but for each row's first ones; zeros behind the last row."""
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    first_row, first_begin = sequence_of(first + tl.arange(0, 1), cu_seqlens_ptr, num_rows, LEVELS)
    first_end = tl.load(cu_seqlens_ptr + first_row + 1)
    is_within = (first - first_begin >= D_CONV - 1) & (first + BLOCK_T <= first_end)
    is_within = is_within & (tl.load(working_ptr + first_row) > 0)
    if tl.max(is_within.to(tl.int32), 0) > 0:
        convolve_within_row(
            first, x_ptr, weight_ptr, bias_ptr, out_ptr, c, ok, stride_x, C, D_CONV, HAS_BIAS, SILU, BLOCK_T
        )
    else:
        # A batch of decoding rows has nothing here: asked once, not in each round.
        tokens = first + tl.arange(0, BLOCK_T)
        is_any, _, _ = written_tokens(tokens, cu_seqlens_ptr, num_rows, num_tokens, D_CONV, LEVELS)
        end = tl.where(tl.max(is_any.to(tl.int32), 0) > 0, tl.minimum(first + BLOCK_T, num_tokens), first)
        for start in range(first, end, MIXED_T):
            token = start + tl.arange(0, MIXED_T)
            written, is_behind, row = written_tokens(token, cu_seqlens_ptr, num_rows, num_tokens, D_CONV, LEVELS)
            if tl.max(written.to(tl.int32), 0) > 0:
                has_state = (tl.load(working_ptr + row) > 0) & ~is_behind
                convolve_some(
                    token, written, has_state, x_ptr, weight_ptr, bias_ptr, out_ptr, c, ok, stride_x,
                    C, D_CONV, HAS_BIAS, SILU,
                )  # fmt: skip


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def convolve(
    x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, cu_seqlens_ptr,
    working_ptr, restore_ptr, fresh_ptr, rolling_ptr, num_rows, num_tokens, stride_x, stride_slot,
    C: tl.constexpr, D_CONV: tl.constexpr, PADDED: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    LEVELS: tl.constexpr, ROW_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    MIXED_T: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Programs of rows come first: what they do takes longest."""
    row_blocks: tl.constexpr = tl.cdiv(C, ROW_C)
    tile_blocks: tl.constexpr = tl.cdiv(C, BLOCK_C)
    program = tl.program_id(0)
    of_rows = num_rows * row_blocks
    if program < of_rows:
        row, block = program // row_blocks, program % row_blocks
        if tl.load(cu_seqlens_ptr + row + 1) - tl.load(cu_seqlens_ptr + row) == 1:
            convolve_one(
                row, block, x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, cu_seqlens_ptr, working_ptr, restore_ptr,
                fresh_ptr, rolling_ptr, stride_x, stride_slot, C, D_CONV, HAS_BIAS, SILU, ROW_C, PACKED,
            )  # fmt: skip
        else:
            convolve_row(
                row, block, x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, cu_seqlens_ptr, working_ptr, restore_ptr,
                fresh_ptr, rolling_ptr, stride_x, stride_slot, C, D_CONV, PADDED, HAS_BIAS, SILU, ROW_C,
            )  # fmt: skip
    else:
        tile = program - of_rows
        convolve_tile(
            tile // tile_blocks * BLOCK_T, tile % tile_blocks, x_ptr, weight_ptr, bias_ptr, out_ptr, cu_seqlens_ptr,
            working_ptr, num_rows, num_tokens, stride_x, C, D_CONV, HAS_BIAS, SILU, LEVELS, BLOCK_T, BLOCK_C,
            MIXED_T,
        )  # fmt: skip


def is_packed(weight: torch.Tensor) -> bool:
    """Whether the weights of a channel are one integer of 4 or 8 bytes."""
    return weight.shape[1] * weight.element_size() in (4, 8) and weight.data_ptr() % 8 == 0


def launch(call: CausalConvCall, out: torch.Tensor) -> None:
    """Fills out and writes the states; checked, non-empty arguments."""
    x, states, slots = call.x, call.states, call.slots
    channels, num_rows, num_tokens = call.channels, slots.num_rows, x.shape[0]
    warps = WARPS if x.numel() < MANY_ELEMENTS else WARPS_OF_MANY
    row_channels, tile_channels = (
        min(size, triton.next_power_of_2(channels)) for size in (warps * ROW_CHANNELS, TILE_CHANNELS)
    )
    padded = triton.next_power_of_2(call.d_conv - 1)
    strides = (x.stride(0), states.stride(0))
    begins = (call.cu_seqlens_q, slots.working, slots.restore, slots.fresh)
    with torch.cuda.device_of(x):
        if slots.num_leaves:
            leave_columns[(slots.num_leaves, triton.cdiv(channels, row_channels))](
                x, states, *begins, slots.leave_row, slots.leave_tokens, slots.leave_slot, *strides,
                C=channels, CARRIED=call.d_conv - 1, PADDED=padded, BLOCK_C=row_channels, num_warps=warps,
            )  # fmt: skip
        tiles = triton.cdiv(num_tokens, TILE_TOKENS) * triton.cdiv(channels, tile_channels)
        convolve[(num_rows * triton.cdiv(channels, row_channels) + tiles,)](
            x, call.weight, call.weight if call.bias is None else call.bias, out, states, *begins, slots.rolling,
            num_rows, num_tokens, *strides,
            C=channels, D_CONV=call.d_conv, PADDED=padded, HAS_BIAS=call.bias is not None, SILU=call.has_silu,
            LEVELS=search_levels(num_rows), ROW_C=row_channels, BLOCK_T=TILE_TOKENS, BLOCK_C=tile_channels,
            MIXED_T=MIXED_TOKENS, PACKED=is_packed(call.weight), num_warps=warps,
        )  # fmt: skip
