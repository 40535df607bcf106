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
from kernels.causal_conv.rows.triton import (
    activated,
    convolve_one,
    convolve_row,
    leave_columns,
    load_bias,
    load_constants,
    load_taps,
    weighted,
)
from kernels.launches import allow_next_launch_and_wait, overlap_options
from kernels.state_slots.triton import slots_of_row

# Channels of a program that serves a row of one token or a snapshot, for each of its warps: 16 bytes of a column for a
# thread. Half as many make a row's first outputs: with all of them a thread has 120 registers, and 72 like this.
ONE_CHANNELS, ROW_CHANNELS = 256, 128
# Tokens of a program that serves a tile, its channels and warps where rows have one token each, where tokens are few
# and where they are many: on an H200 2,048 tokens of 8,192 channels take 23.7 us with the second and 26.4 with the
# third, 8,192 tokens 74.7 and 70.1; a copy takes 20.6 and 67.8.
TILE_TOKENS = 16
DECODE_TILE, FEW_TILE, MANY_TILE = (256, 4), (128, 2), (256, 2)
MANY_TOKENS = 4096
# From how many tokens on most tiles lie within a row, and only those are computed without asking token by token.
WHOLE_TOKENS = 1024
# Tokens that are loaded at once where rows begin or end within a tile.
MIXED_TOKENS = 4


@triton.jit
def load_columns(first, x_ptr, c, ok, num_tokens, stride_x, D_CONV: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns the columns of BLOCK_T tokens and of the D_CONV - 1 before them, zeros where there is no such token.

    All on their way before the first is used: 3.7 TB/s on an H200, and 3.0 with eight at a time.
    """
    columns = ()
    for j in tl.static_range(BLOCK_T + D_CONV - 1):
        token = first + (j - D_CONV + 1)
        is_token = ok & (token >= 0) & (token < num_tokens)
        columns += (tl.load(x_ptr + token.to(tl.int64) * stride_x + c, mask=is_token, other=0.0),)  # type: ignore
    return columns


@triton.jit
def convolve_within_row(
    first, begin, end, num_tokens, columns, taps, bias, out_ptr, c, ok,
    C: tl.constexpr, D_CONV: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_T tokens of the row from `begin` to `end`, but for its first ones, and zeros behind it: each
    column is loaded once. WHOLE: there are none of either, and no token is asked."""
    out_at = out_ptr + first.to(tl.int64) * C + c
    for j in tl.static_range(BLOCK_T):
        total = activated(weighted(columns, taps, bias, j, D_CONV), SILU)
        is_written = ok
        if not WHOLE:
            token = first + j
            total = tl.where(token < end, total, 0.0)
            is_written = ok & (token < num_tokens) & ((token >= end) | (token - begin >= D_CONV - 1))
        tl.store(out_at + j * C, total.to(out_ptr.dtype.element_ty), mask=is_written)


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
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, MIXED_T: tl.constexpr, DECODES: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_T tokens of any rows, but for each row's first ones; zeros behind the last row."""
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = c < C
    if DECODES:
        taps, bias = load_constants(weight_ptr, bias_ptr, c, ok, D_CONV, HAS_BIAS, PACKED, OVERLAPS)
    else:
        # Columns first, on their way while the tile's row is found.
        allow_next_launch_and_wait(OVERLAPS)
        columns = load_columns(first, x_ptr, c, ok, num_tokens, stride_x, D_CONV, BLOCK_T)
        taps, bias = load_taps(weight_ptr, c, ok, D_CONV, PACKED), load_bias(bias_ptr, c, ok, HAS_BIAS)
    last_end = tl.load(cu_seqlens_ptr + num_rows)
    rows, begins = sequence_of(first + tl.arange(0, 1), cu_seqlens_ptr, num_rows, LEVELS)
    first_row, first_begin = tl.max(rows, 0), tl.max(begins, 0)
    first_end = tl.load(cu_seqlens_ptr + first_row + 1)
    if WHOLE:
        is_within = (first - first_begin >= D_CONV - 1) & (first + BLOCK_T <= first_end)
    else:  # of one row, behind which nothing comes in this tile but tokens of no row
        is_within = (tl.minimum(first + BLOCK_T, num_tokens) <= first_end) | (first_end == last_end)
    if is_within & (tl.load(working_ptr + first_row) > 0):
        if DECODES:
            columns = load_columns(first, x_ptr, c, ok, num_tokens, stride_x, D_CONV, BLOCK_T)
        convolve_within_row(
            first, first_begin, first_end, num_tokens, columns, taps, bias, out_ptr, c, ok,
            C, D_CONV, SILU, BLOCK_T, WHOLE,
        )  # fmt: skip
    else:
        end = tl.minimum(first + BLOCK_T, num_tokens)
        if DECODES:  # hardly a tile has something to write: asked once, not in each round
            tokens = first + tl.arange(0, BLOCK_T)
            is_any, _, _ = written_tokens(tokens, cu_seqlens_ptr, num_rows, num_tokens, D_CONV, LEVELS)
            end = tl.where(tl.max(is_any.to(tl.int32), 0) > 0, end, first)
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
    MIXED_T: tl.constexpr, DECODES: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs of rows come first: what they do takes longest. DECODES: most rows are expected to have one token."""
    row_blocks: tl.constexpr = tl.cdiv(C, ROW_C)
    tile_blocks: tl.constexpr = tl.cdiv(C, BLOCK_C)
    program = tl.program_id(0)
    of_rows = num_rows * row_blocks
    if program < of_rows:
        row, block = program // row_blocks, program % row_blocks
        c = block * ROW_C + tl.arange(0, ROW_C)
        ok = c < C
        taps, bias = load_constants(weight_ptr, bias_ptr, c, ok, D_CONV, HAS_BIAS, PACKED, OVERLAPS)
        begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + row + 1) - begin).to(tl.int32)
        source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
        rolling = tl.load(rolling_ptr + row).to(tl.int64)
        if not DECODES:
            convolve_row(
                begin, length, source, working, rolling, taps, bias, x_ptr, out_ptr, states_ptr, c, ok, stride_x,
                stride_slot, C, D_CONV, PADDED, SILU,
            )  # fmt: skip
        elif length == 1:
            convolve_one(
                begin, source, working, rolling, taps, bias, x_ptr, out_ptr, states_ptr, c, ok, stride_x, stride_slot,
                C, D_CONV, SILU,
            )  # fmt: skip
        else:  # rare: a half at a time, as all at once would take registers of the programs that have one token
            HALF: tl.constexpr = ROW_C // 2 if ROW_C > 1 else 1
            for half in range(2):
                some = (block * 2 + half) * HALF + tl.arange(0, HALF)
                is_some = some < C
                some_taps = load_taps(weight_ptr, some, is_some, D_CONV, PACKED)
                convolve_row(
                    begin, length, source, working, rolling, some_taps, load_bias(bias_ptr, some, is_some, HAS_BIAS),
                    x_ptr, out_ptr, states_ptr, some, is_some, stride_x, stride_slot, C, D_CONV, PADDED, SILU,
                )  # fmt: skip
    else:
        tile = program - of_rows
        convolve_tile(
            tile // tile_blocks * BLOCK_T, tile % tile_blocks, x_ptr, weight_ptr, bias_ptr, out_ptr, cu_seqlens_ptr,
            working_ptr, num_rows, num_tokens, stride_x, C, D_CONV, HAS_BIAS, SILU, LEVELS, BLOCK_T, BLOCK_C,
            MIXED_T, DECODES, PACKED, WHOLE, OVERLAPS,
        )  # fmt: skip


def is_packed(weight: torch.Tensor) -> bool:
    """Whether the weights of a channel are one integer of 4 or 8 bytes."""
    return weight.shape[1] * weight.element_size() in (4, 8) and weight.data_ptr() % 8 == 0


def launch(call: CausalConvCall, out: torch.Tensor) -> None:
    """Fills out and writes the states; checked, non-empty arguments."""
    x, states, slots = call.x, call.states, call.slots
    channels, num_rows, num_tokens = call.channels, slots.num_rows, x.shape[0]
    # No cu_seqlens_q is read for this, so not every row need have one token: the kernel asks each of them. With prompts
    # that would cost more than it brings: 77 us instead of 73 for 8,192 tokens on an H200.
    decodes = num_tokens <= num_rows
    tile_channels, warps = DECODE_TILE if decodes else FEW_TILE if num_tokens < MANY_TOKENS else MANY_TILE
    one_channels, row_channels, tile_channels = (
        min(size, triton.next_power_of_2(channels))
        for size in (ONE_CHANNELS * warps, (ONE_CHANNELS if decodes else ROW_CHANNELS) * warps, tile_channels)
    )
    padded, options = triton.next_power_of_2(call.d_conv - 1), overlap_options(x.device)
    strides = (x.stride(0), states.stride(0))
    begins = (call.cu_seqlens_q, slots.working, slots.restore, slots.fresh)
    with torch.cuda.device_of(x):
        if slots.num_leaves:
            leave_columns[(slots.num_leaves, triton.cdiv(channels, one_channels))](
                x, states, *begins, slots.leave_row, slots.leave_tokens, slots.leave_slot, *strides,
                C=channels, CARRIED=call.d_conv - 1, PADDED=padded, BLOCK_C=one_channels, num_warps=warps, **options,
            )  # fmt: skip
        tiles = triton.cdiv(num_tokens, TILE_TOKENS) * triton.cdiv(channels, tile_channels)
        convolve[(num_rows * triton.cdiv(channels, row_channels) + tiles,)](
            x, call.weight, call.weight if call.bias is None else call.bias, out, states, *begins, slots.rolling,
            num_rows, num_tokens, *strides,
            C=channels, D_CONV=call.d_conv, PADDED=padded, HAS_BIAS=call.bias is not None, SILU=call.has_silu,
            LEVELS=search_levels(num_rows), ROW_C=row_channels, BLOCK_T=TILE_TOKENS, BLOCK_C=tile_channels,
            MIXED_T=MIXED_TOKENS, DECODES=decodes, PACKED=is_packed(call.weight),
            WHOLE=not decodes and num_tokens >= WHOLE_TOKENS, num_warps=warps, **options,
        )  # fmt: skip
