"""Updates of states in Triton: one program for a row, a head and some of its values, which holds its part of the state.

Pure traffic: each state is read once and written once, or twice where it goes to a rolling slot. Everything is fp32.
"""

import torch
import triton
import triton.language as tl

from kernels.block_scan import GatedDeltaLayer, Mamba2Layer
from kernels.block_scan.triton import state_places, step_sizes
from kernels.launches import allow_next_launch_and_wait, overlap_options
from kernels.state_slots import StateSlots
from kernels.state_slots.triton import slots_of_row

# Values of a program: 32 KB of a state with 128 keys.
VALUES = 64
WARPS = 2


@triton.jit
def load_state(states_ptr, source, stride_slot, place, ok):
    return tl.load(states_ptr + source * stride_slot + place, mask=ok & (source > 0), other=0.0)


@triton.jit
def store_state(states_ptr, rolling_ptr, row, working, stride_slot, place, ok, state):
    rolling = tl.load(rolling_ptr + row).to(tl.int64)
    tl.debug_barrier()  # a row without tokens reads and writes its state alike
    tl.store(states_ptr + rolling * stride_slot + place, state, mask=ok & (rolling > 0))
    tl.store(states_ptr + working * stride_slot + place, state, mask=ok)


@triton.jit
def clear_outputs(out_ptr, begin, end, head, e, is_value, HEADS: tl.constexpr, DV: tl.constexpr):
    for token in range(begin, end):
        at = (tl.zeros_like(e) + token).to(tl.int64) * (HEADS * DV) + head * DV + e
        tl.store(out_ptr + at, tl.zeros_like(e).to(out_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def clear_what_nobody_has(
    out_ptr, cu_ptr, row, working, num_rows, num_tokens, head, e, is_value, HEADS: tl.constexpr, DV: tl.constexpr
):
    """Zeros for a padding row's tokens, and by the last row for those behind it."""
    if working <= 0:
        clear_outputs(out_ptr, tl.load(cu_ptr + row), tl.load(cu_ptr + row + 1), head, e, is_value, HEADS, DV)
    if row == num_rows - 1:
        clear_outputs(out_ptr, tl.load(cu_ptr + num_rows), num_tokens, head, e, is_value, HEADS, DV)


@triton.jit
def load_delta_token(
    token, end, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, head, d, e, is_key, is_value,
    stride_q, stride_k, stride_v, stride_g, stride_beta,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HAS_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Returns q, k, v, g and beta of a token for a head as they lie in memory, zeros where the row has ended."""
    has = token < end
    is_key, is_value = is_key & has, is_value & has
    q = tl.load(q_ptr + token * stride_q + head // GROUP * DK + d, mask=is_key, other=0.0)
    k = tl.load(k_ptr + token * stride_k + head // GROUP * DK + d, mask=is_key, other=0.0)
    v = tl.load(v_ptr + token * stride_v + head * DV + e, mask=is_value, other=0.0)
    if HAS_CHANNELS:
        g = tl.load(g_ptr + token * stride_g + head * DK + d, mask=is_key, other=0.0)
    else:
        g = tl.load(g_ptr + token * stride_g + head, mask=has, other=0.0)
    return q, k, v, g, tl.load(beta_ptr + token * stride_beta + head, mask=has, other=0.0)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def update_delta(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, states_ptr, out_ptr, cu_ptr, working_ptr, restore_ptr, fresh_ptr,
    rolling_ptr, num_rows, num_tokens, scale, norm_eps, stride_q, stride_k, stride_v, stride_g, stride_beta,
    stride_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, NORM: tl.constexpr,
    HAS_CHANNELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    allow_next_launch_and_wait(OVERLAPS)
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
    token = tl.load(cu_ptr + row).to(tl.int64)
    end = tl.load(cu_ptr + row + 1).to(tl.int64)
    d, e = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    is_key, is_value = d < DK, e < DV
    if working > 0:
        # Before the state, or it waits behind it: 64 rows take 73.8 us on an H200, not 79.6 (by channel 75, not 87).
        given = load_delta_token(
            token, end, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, head, d, e, is_key, is_value,
            stride_q, stride_k, stride_v, stride_g, stride_beta, GROUP, DK, DV, HAS_CHANNELS,
        )  # fmt: skip
        place, ok = state_places(head, tl.program_id(1) * BV, DK, DV, False, BK, BV)
        state = load_state(states_ptr, source, stride_slot, place, ok)
        while token < end:
            q, k = given[0].to(tl.float32), given[1].to(tl.float32)
            v, beta = given[2].to(tl.float32), given[4].to(tl.float32)
            decay = tl.exp(given[3].to(tl.float32))
            if HAS_CHANNELS:
                decay = decay[:, None]
            if NORM:
                q *= tl.rsqrt(tl.sum(q * q, 0) + norm_eps)
                k *= tl.rsqrt(tl.sum(k * k, 0) + norm_eps)
            state *= decay
            error = v - tl.sum(state * k[:, None], 0)
            state += k[:, None] * (error * beta)[None, :]
            out = tl.sum(state * q[:, None], 0) * scale
            tl.store(out_ptr + token * (HEADS * DV) + head * DV + e, out.to(out_ptr.dtype.element_ty), mask=is_value)
            token += 1
            given = load_delta_token(
                token, end, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, head, d, e, is_key, is_value,
                stride_q, stride_k, stride_v, stride_g, stride_beta, GROUP, DK, DV, HAS_CHANNELS,
            )  # fmt: skip
        store_state(states_ptr, rolling_ptr, row, working, stride_slot, place, ok, state)
    clear_what_nobody_has(out_ptr, cu_ptr, row, working, num_rows, num_tokens, head, e, is_value, HEADS, DV)


@triton.jit
def load_ssd_token(
    token, end, x_ptr, b_ptr, c_ptr, raw_ptr, gate_ptr, head, d, e, is_key, is_value,
    stride_x, stride_b, stride_c, stride_raw, stride_gate,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Returns x, b, c, the raw step size and the gate of a token for a head; zeros where the row has ended."""
    has = token < end
    is_key, is_value = is_key & has, is_value & has
    b = tl.load(b_ptr + token * stride_b + head // GROUP * DK + d, mask=is_key, other=0.0)
    c = tl.load(c_ptr + token * stride_c + head // GROUP * DK + d, mask=is_key, other=0.0)
    x = tl.load(x_ptr + token * stride_x + head * DV + e, mask=is_value, other=0.0)
    raw = tl.load(raw_ptr + token * stride_raw + head, mask=has, other=0.0)
    gate = x
    if HAS_GATE:
        gate = tl.load(gate_ptr + token * stride_gate + head * DV + e, mask=is_value, other=0.0)
    return x, b, c, raw, gate


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def update_ssd(
    x_ptr, b_ptr, c_ptr, raw_ptr, bias_ptr, a_ptr, skip_ptr, gate_ptr, states_ptr, out_ptr, cu_ptr,
    working_ptr, restore_ptr, fresh_ptr, rolling_ptr, num_rows, num_tokens, least, most, stride_x, stride_b, stride_c,
    stride_raw, stride_gate, stride_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    a = tl.load(a_ptr + head)
    bias, skip = a, a
    if HAS_BIAS:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    if HAS_SKIP:
        skip = tl.load(skip_ptr + head)
    allow_next_launch_and_wait(OVERLAPS)
    source, working = slots_of_row(row, working_ptr, restore_ptr, fresh_ptr)
    d, e = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    is_key, is_value = d < DK, e < DV
    if working > 0:
        token = tl.load(cu_ptr + row).to(tl.int64)
        end = tl.load(cu_ptr + row + 1).to(tl.int64)
        # Before the state, as in update_delta: 64 rows take 138 us on an H200, not 140, and 8 rows 22.9, not 26.4.
        given = load_ssd_token(
            token, end, x_ptr, b_ptr, c_ptr, raw_ptr, gate_ptr, head, d, e, is_key, is_value,
            stride_x, stride_b, stride_c, stride_raw, stride_gate, GROUP, DK, DV, HAS_GATE,
        )  # fmt: skip
        place, ok = state_places(head, tl.program_id(1) * BV, DK, DV, True, BK, BV)
        state = load_state(states_ptr, source, stride_slot, place, ok)
        while token < end:
            b, c = given[1].to(tl.float32), given[2].to(tl.float32)
            x, raw = given[0].to(tl.float32), given[3].to(tl.float32)
            if HAS_BIAS:
                raw += bias
            dt = step_sizes(raw, least, most)
            state = state * tl.exp(dt * a) + b[:, None] * (x * dt)[None, :]
            out = tl.sum(state * c[:, None], 0)
            if HAS_SKIP:
                out += x * skip
            if HAS_GATE:
                gate = given[4].to(tl.float32)
                out *= gate / (1.0 + tl.exp(-gate))
            tl.store(out_ptr + token * (HEADS * DV) + head * DV + e, out.to(out_ptr.dtype.element_ty), mask=is_value)
            token += 1
            given = load_ssd_token(
                token, end, x_ptr, b_ptr, c_ptr, raw_ptr, gate_ptr, head, d, e, is_key, is_value,
                stride_x, stride_b, stride_c, stride_raw, stride_gate, GROUP, DK, DV, HAS_GATE,
            )  # fmt: skip
        store_state(states_ptr, rolling_ptr, row, working, stride_slot, place, ok, state)
    clear_what_nobody_has(out_ptr, cu_ptr, row, working, num_rows, num_tokens, head, e, is_value, HEADS, DV)


def launch_gated_delta(
    layer: GatedDeltaLayer, cu_seqlens_q: torch.Tensor, slots: StateSlots, out: torch.Tensor
) -> None:
    """Fills out, writes the states; checked, non-empty arguments."""
    tokens, heads, dim_v = out.shape
    k_heads, dim_k = layer.k.shape[1:]
    rows = (layer.q, layer.k, layer.v, layer.g, layer.beta)
    values = min(VALUES, triton.next_power_of_2(dim_v))
    with torch.cuda.device_of(out):
        update_delta[(slots.num_rows * heads, triton.cdiv(dim_v, values))](
            *rows, layer.states, out, cu_seqlens_q, slots.working, slots.restore, slots.fresh, slots.rolling,
            slots.num_rows, tokens, layer.scale, layer.norm_eps or 0.0, *(tensor.stride(0) for tensor in rows),
            layer.states.stride(0),
            HEADS=heads, GROUP=heads // k_heads, DK=dim_k, DV=dim_v, NORM=layer.norm_eps is not None,
            HAS_CHANNELS=layer.by_channel, BK=triton.next_power_of_2(dim_k), BV=values,
            num_warps=WARPS, **overlap_options(out.device),
        )  # fmt: skip


def launch_mamba2(layer: Mamba2Layer, cu_seqlens_q: torch.Tensor, slots: StateSlots, out: torch.Tensor) -> None:
    """Fills out, writes the states; checked, non-empty arguments."""
    tokens, heads, dim_v = out.shape
    groups, dim_k = layer.b.shape[1:]
    steps, gate = layer.steps, layer.x if layer.gate is None else layer.gate
    bias, skip = (steps.a if tensor is None else tensor for tensor in (steps.bias, layer.skip))
    values = min(VALUES, triton.next_power_of_2(dim_v))
    rows = (layer.x, layer.b, layer.c, steps.raw, gate, layer.states)
    with torch.cuda.device_of(out):
        update_ssd[(slots.num_rows * heads, triton.cdiv(dim_v, values))](
            layer.x, layer.b, layer.c, steps.raw, bias, steps.a, skip, gate, layer.states, out, cu_seqlens_q,
            slots.working, slots.restore, slots.fresh, slots.rolling, slots.num_rows, tokens, steps.least, steps.most,
            *(tensor.stride(0) for tensor in rows),
            HEADS=heads, GROUP=heads // groups, DK=dim_k, DV=dim_v, HAS_BIAS=steps.bias is not None,
            HAS_SKIP=layer.skip is not None, HAS_GATE=layer.gate is not None,
            BK=triton.next_power_of_2(dim_k), BV=values, num_warps=WARPS, **overlap_options(out.device),
        )  # fmt: skip
