"""Gates in Triton: pure traffic, a program for a run of a row's columns, for a head, or for a row's heads."""

import math

import torch
import triton
import triton.language as tl

from kernels.gates.reference import SOFTPLUS_LIMIT
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Columns of a program: 2 KiB of 16-bit values, written as one run.
COLUMNS = 1024
# Elements that one warp sums.
WARP_ELEMENTS = 512
# Heads of a program where heads are many, and how many that is: more than an H200 holds at once, 32 programs on each
# multiprocessor. With one head each 512 tokens of 32 heads take 11 us, of which their traffic is 4.
PART, MANY_HEADS = 4, 32 * 132
LIMIT: tl.constexpr = tl.constexpr(SOFTPLUS_LIMIT)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def multiply_by_sigmoid(
    x_ptr, gate_ptr, out_ptr, stride_x, stride_gate, D: tl.constexpr, COLUMNS: tl.constexpr, ONE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    allow_next_launch_and_wait(OVERLAPS)
    runs: tl.constexpr = tl.cdiv(D, COLUMNS)
    row = (tl.program_id(0) // runs).to(tl.int64)
    d = tl.program_id(0) % runs * COLUMNS + tl.arange(0, COLUMNS)
    ok = d < D
    x = tl.load(x_ptr + row * stride_x + d, mask=ok, other=0.0)
    if ONE:
        gate = tl.load(gate_ptr + row * stride_gate).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + row * stride_gate + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, (x.to(tl.float32) * _sigmoid(gate)).to(x.dtype), mask=ok)


@triton.jit
def norm_and_gate(
    x_ptr, weight_ptr, gate_ptr, out_ptr, eps, stride_gate, HEADS: tl.constexpr, D: tl.constexpr, SILU: tl.constexpr,
    PART: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """PART heads of a row, each in the order of a program that has it alone; all loads are on their way at once."""
    parts: tl.constexpr = HEADS // PART
    row, head = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * PART
    d = tl.arange(0, BLOCK_D)
    ok = d < D
    weight = tl.load(weight_ptr + d, mask=ok, other=0.0).to(tl.float32)
    allow_next_launch_and_wait(OVERLAPS)
    place = (row * HEADS + head) * D + d
    gate_at = gate_ptr + row * stride_gate + head * D + d
    rows, gates = (), ()
    for i in tl.static_range(PART):
        rows += (tl.load(x_ptr + place + i * D, mask=ok, other=0.0),)  # type: ignore[assignment]
        gates += (tl.load(gate_at + i * D, mask=ok, other=0.0),)  # type: ignore[assignment]
    for i in tl.static_range(PART):
        wide = rows[i].to(tl.float32)  # type: ignore[var-annotated]
        gate = gates[i].to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps) * weight
        factor = gate * _sigmoid(gate) if SILU else _sigmoid(gate)
        tl.store(out_ptr + place + i * D, (normed * factor).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def softplus(raw):
    power = tl.exp(tl.where(raw > LIMIT, LIMIT, raw))
    # The quotient makes up for the digits of the exponential that its sum with 1 lost.
    above = 1.0 + power
    small = tl.where(above == 1.0, power, tl.log(above) * (power / (above - 1.0)))
    return tl.where(raw > LIMIT, raw, small)


@triton.jit
def gate_delta(
    decay_ptr,
    beta_ptr,
    bias_ptr,
    a_ptr,
    g_ptr,
    betas_ptr,
    stride_decay,
    stride_beta,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    ok = head < HEADS
    bias = tl.load(bias_ptr + head, mask=ok, other=0.0)
    a = tl.load(a_ptr + head, mask=ok, other=0.0)
    allow_next_launch_and_wait(OVERLAPS)
    raw = tl.load(decay_ptr + row * stride_decay + head, mask=ok, other=0.0).to(tl.float32)
    raw += bias
    g = softplus(raw) * a
    beta = tl.load(beta_ptr + row * stride_beta + head, mask=ok, other=0.0).to(tl.float32)
    tl.store(g_ptr + row * HEADS + head, g, mask=ok)
    tl.store(betas_ptr + row * HEADS + head, _sigmoid(beta), mask=ok)


@triton.jit
def gate_channels(
    decay_ptr, beta_ptr, bias_ptr, a_ptr, g_ptr, betas_ptr, stride_decay, stride_beta,
    HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some of a row's channels; the first program of a row takes its betas too."""
    runs: tl.constexpr = tl.cdiv(HEADS * KEYS, COLUMNS)
    row, run = (tl.program_id(0) // runs).to(tl.int64), tl.program_id(0) % runs
    d = run * COLUMNS + tl.arange(0, COLUMNS)
    ok = d < HEADS * KEYS
    bias = tl.load(bias_ptr + d, mask=ok, other=0.0)
    a = tl.load(a_ptr + d // KEYS, mask=ok, other=0.0)
    allow_next_launch_and_wait(OVERLAPS)
    raw = tl.load(decay_ptr + row * stride_decay + d, mask=ok, other=0.0).to(tl.float32)
    raw += bias
    tl.store(g_ptr + row * (HEADS * KEYS) + d, softplus(raw) * a, mask=ok)
    if run == 0:
        head = tl.arange(0, BLOCK_H)
        beta = tl.load(beta_ptr + row * stride_beta + head, mask=head < HEADS, other=0.0).to(tl.float32)
        tl.store(betas_ptr + row * HEADS + head, _sigmoid(beta), mask=head < HEADS)


def launch_sigmoid(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out; checked, non-empty arguments."""
    rows, dim = x.shape
    columns = min(COLUMNS, triton.next_power_of_2(dim))
    with torch.cuda.device_of(x):
        multiply_by_sigmoid[(rows * triton.cdiv(dim, columns),)](
            x, gate, out, x.stride(0), gate.stride(0),
            D=dim, COLUMNS=columns, ONE=gate.shape[1] == 1, num_warps=4, **overlap_options(x.device),
        )  # fmt: skip


def launch_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor, out: torch.Tensor, silu: bool
) -> None:
    """Fills out; checked, non-empty arguments."""
    rows, heads, dim = x.shape
    block = triton.next_power_of_2(dim)
    # How many elements a thread takes, and so the order of the sum, follows from what Triton knows of a head's place: a
    # multiple of 8 is all that counts.
    part = math.gcd(PART, heads) if rows * heads > MANY_HEADS and dim % 8 == 0 else 1
    with torch.cuda.device_of(x):
        norm_and_gate[(rows * (heads // part),)](
            x,
            weight,
            gate,
            out,
            eps,
            gate.stride(0),
            HEADS=heads,
            D=dim,
            SILU=silu,
            PART=part,
            BLOCK_D=block,
            num_warps=max(1, block // WARP_ELEMENTS),
            **overlap_options(x.device),
        )


def launch_delta(
    decay: torch.Tensor, beta: torch.Tensor, bias: torch.Tensor, a: torch.Tensor, g: torch.Tensor, betas: torch.Tensor
) -> None:
    """Fills g and betas; checked, non-empty arguments."""
    (rows, columns), heads = decay.shape, beta.shape[1]
    options = overlap_options(decay.device)
    with torch.cuda.device_of(decay):
        if columns > heads:
            run = min(COLUMNS, triton.next_power_of_2(columns))
            gate_channels[(rows * triton.cdiv(columns, run),)](
                decay, beta, bias, a, g, betas, decay.stride(0), beta.stride(0),
                HEADS=heads, KEYS=columns // heads, COLUMNS=run, BLOCK_H=triton.next_power_of_2(heads),
                num_warps=4, **options,
            )  # fmt: skip
            return
        gate_delta[(rows,)](
            decay,
            beta,
            bias,
            a,
            g,
            betas,
            decay.stride(0),
            beta.stride(0),
            HEADS=heads,
            BLOCK_H=triton.next_power_of_2(heads),
            num_warps=1,
            **options,
        )
