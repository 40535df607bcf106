"""What is measured of the ops on recurrent states, with the shapes of Qwen3-Next-80B-A3B, Kimi-Linear and Bamba-9B.

Decode, convolutions and copies: GB/s of what is read and written. Prompts: TFLOP/s of the products that blocks of 64
need. Peers are fla's and mamba_ssm's kernels where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from benchmarks.measurement import GEMM, OUT_TOLERANCE, Maker, Measurement, Peer, random, row_error, unequal
from kernels.backend import Backend
from kernels.block_scan import GRID_TOKENS, ScanPlan, plan_scan
from kernels.causal_conv import causal_conv
from kernels.copy_states import copy_states
from kernels.gated_delta_scan import gated_delta_scan
from kernels.mamba2_scan import Mamba2Steps, mamba2_scan
from kernels.state_slots import StateSlots
from kernels.state_update import update_gated_delta, update_mamba2

DEVICE = "cuda"
PROMPTS = (2048, 8192)
DECODES = 64
# Qwen3-Next: 16 heads of keys, 32 of values, 128 each; its convolution goes over queries, keys and values.
DELTA = (16, 32, 128, 128)
CHANNELS, D_CONV = 8192, 4
# Bamba: one group, 128 heads of 64, which remember 128.
MAMBA2 = (1, 128, 64, 128)

# Behind the name of an op with a decay for each key channel.
BY_CHANNEL = "_by_channel"

# Queries, keys, values, g and beta.
Delta = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# An op on a backend and a pool.
Op = Callable[[Backend, torch.Tensor], torch.Tensor]


def indices(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def slots_for(rows: int, left: tuple[int, ...] = (), *, rolling: bool = False) -> StateSlots:
    """Rows that continue, each in a slot of its own; the first one leaves states after `left` of its tokens."""
    working = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
    leave_slot = indices(*(2 * rows + 1 + entry for entry in range(len(left))))
    none = torch.zeros_like(working)
    at_roll, leave_row = working + rows if rolling else none, indices(*(0 for _ in left))
    return StateSlots(working, none, none, at_roll, leave_row, indices(*left), leave_slot)


def pool_for(slots: StateSlots, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random(2 * slots.num_rows + slots.num_leaves + 1, *shape, dtype=dtype)


def begins(rows: int, tokens: int) -> torch.Tensor:
    return torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * tokens


def state_error(op: Op, pool: torch.Tensor) -> float:
    """Returns the worst of the outputs' rows and of the states, against the reference from the same pool."""
    mine, theirs = pool.clone(), pool.clone()
    got, wanted = op(Backend.AUTO, mine), op(Backend.REFERENCE, theirs)
    return max(row_error(got.flatten(1), wanted.flatten(1)), row_error(mine[1:].flatten(1), theirs[1:].flatten(1)))


def convolve(rows: int, tokens: int) -> list[Measurement]:
    x, weight = random(rows * tokens, CHANNELS), random(CHANNELS, D_CONV)
    cu, slots = begins(rows, tokens), slots_for(rows)
    pool = pool_for(slots, D_CONV - 1, CHANNELS, dtype=x.dtype)

    def op(backend: Backend, states: torch.Tensor) -> torch.Tensor:
        return causal_conv(x, weight, None, cu, states, slots, silu=True, backend=backend)

    amount = 4e-9 * (x.numel() + rows * pool[0].numel())
    case, run = f"{rows} x {tokens} tokens, {CHANNELS} channels", partial(op, Backend.AUTO, pool)
    # A launch of 2,048 tokens is too short to copy at the rate of large ones: what a copy of that size reaches.
    copied = Peer("copy_", partial(torch.empty_like(x).copy_, x), 4e-9 * x.numel())
    return [Measurement("causal_conv", case, amount, run, partial(state_error, op, pool), OUT_TOLERANCE, (copied,))]


def copy(pairs: int) -> list[Measurement]:
    pool = random(2 * pairs + 1, *DELTA[1:], dtype=torch.float32)
    sources = torch.randperm(pairs, device=DEVICE).int() + 1
    targets = sources + pairs
    call = partial(copy_states, pool, sources, targets)

    def error() -> float:
        wanted = pool.index_copy(0, targets.long(), pool[sources.long()])
        call()
        return unequal(pool, wanted)

    amount = 8e-9 * pairs * pool[0].numel()
    chosen = pool[sources.long()]
    peer = Peer("index_copy_", partial(pool.index_copy_, 0, targets.long(), chosen), amount)
    return [Measurement("copy_states", f"{pairs} of {pool[0].nbytes} B", amount, call, error, peers=(peer,))]


def delta_inputs(tokens: int, by_channel: bool) -> Delta:
    """With a decay for each key channel there are as many heads of keys as of values, as Kimi Linear has them."""
    k_heads, heads, k_dim, dim = DELTA
    k_heads = heads if by_channel else k_heads
    g = -torch.rand(tokens, heads, *([k_dim] if by_channel else []), device=DEVICE)
    beta = torch.rand(tokens, heads, device=DEVICE)
    return random(tokens, k_heads, k_dim), random(tokens, k_heads, k_dim), random(tokens, heads, dim), g, beta


def mamba2_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Mamba2Steps]:
    groups, heads, dim, d_state = MAMBA2
    steps = Mamba2Steps(random(tokens, heads), random(heads), -torch.rand(heads, device=DEVICE))
    return random(tokens, heads, dim), random(tokens, groups, d_state), random(tokens, groups, d_state), steps


def update(name: str, rolling: bool) -> list[Measurement]:
    """B64 decode of one layer: each state is read once and written once, or twice; the tokens' rows add 1 %."""
    slots, cu = slots_for(DECODES, rolling=rolling), begins(DECODES, 1)
    is_mamba2 = name == "update_mamba2"
    *rows, steps = mamba2_inputs(DECODES) if is_mamba2 else delta_inputs(DECODES, name.endswith(BY_CHANNEL))
    pool = pool_for(slots, *(MAMBA2[1:] if is_mamba2 else DELTA[1:]))

    def op(backend: Backend, states: torch.Tensor) -> torch.Tensor:
        if is_mamba2:
            return update_mamba2(*rows, steps, states, cu, slots, backend=backend)
        return update_gated_delta(*rows, steps, states, cu, slots, norm_eps=1e-6, backend=backend)

    out = op(Backend.AUTO, pool)
    num_bytes = DECODES * pool[0].nbytes * (3 if rolling else 2) + sum(tensor.nbytes for tensor in (*rows, out))
    case = f"B{DECODES}{', rolling' if rolling else ''}"
    run = partial(op, Backend.AUTO, pool)
    # What a copy reaches that reads and writes as many bytes.
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    copied = Peer("copy_", partial(torch.empty_like(source).copy_, source), 1e-9 * num_bytes)
    error = partial(state_error, op, pool)
    return [Measurement(name, case, 1e-9 * num_bytes, run, error, OUT_TOLERANCE, (copied,))]


def scan(name: str, tokens: int, left: tuple[int, ...]) -> list[Measurement]:
    """One prompt of `tokens`, with snapshots after `left` of them."""
    slots, cu = slots_for(1, left), begins(1, tokens)
    plan = plan_scan(cu, cu, slots, tokens)
    is_delta = name != "mamba2_scan"
    op, shape, peers = delta_scan(tokens, plan, name.endswith(BY_CHANNEL)) if is_delta else ssd_scan(tokens, plan)
    heads, rows, columns = shape
    # Within a block: three products with keys and two with values; two products with keys and values of Mamba2.
    within = 3 * rows + 2 * columns if is_delta else rows + columns
    states = (6 if is_delta else 4) * rows * columns
    amount = 1e-12 * tokens * heads * (states + 2 * GRID_TOKENS * within)
    pool = pool_for(slots, *shape)
    case = f"{tokens} tokens{f', {len(left)} snapshots' if left else ''}"
    run, error = partial(op, Backend.AUTO, pool), partial(state_error, op, pool)
    return [
        Measurement(name, case, amount, run, error, OUT_TOLERANCE, tuple(Peer(*peer, amount) for peer in peers), GEMM)
    ]


# An op, its states' shape, and its peers by name.
Scan = tuple[Op, tuple[int, int, int], list[tuple[str, Callable[[], object]]]]


def delta_scan(tokens: int, plan: ScanPlan, by_channel: bool) -> Scan:
    given = delta_inputs(tokens, by_channel)

    def op(backend: Backend, states: torch.Tensor) -> torch.Tensor:
        return gated_delta_scan(*given, states, plan, norm_eps=1e-6, backend=backend)

    def fla() -> object:
        """Its heads of keys are as many as those of values."""
        ops = import_module("fla.ops.kda" if by_channel else "fla.ops.gated_delta_rule")
        rule = ops.chunk_kda if by_channel else ops.chunk_gated_delta_rule
        return rule(*given_to_fla, output_final_state=True, use_qk_l2norm_in_kernel=True)

    queries = [rows.repeat_interleave(DELTA[1] // rows.shape[1], 1) for rows in given[:2]]
    given_to_fla = [tensor[None] for tensor in (*queries, *given[2:])]
    return op, (DELTA[1], DELTA[2], DELTA[3]), [("fla", fla)]


def ssd_scan(tokens: int, plan: ScanPlan) -> Scan:
    x, b, c, steps = mamba2_inputs(tokens)

    def op(backend: Backend, states: torch.Tensor) -> torch.Tensor:
        return mamba2_scan(x, b, c, steps, states, plan, backend=backend)

    def mamba_ssm() -> object:
        combined = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        rows = (x[None], steps.raw[None], steps.a, b[None], c[None])
        return combined(*rows, chunk_size=256, dt_bias=steps.bias, dt_softplus=True, return_final_states=True)

    return op, (MAMBA2[1], MAMBA2[2], MAMBA2[3]), [("mamba_ssm", mamba_ssm)]


SCANS = ("gated_delta_scan", f"gated_delta_scan{BY_CHANNEL}", "mamba2_scan")
AREAS: dict[str, tuple[Maker, ...]] = {
    "states": (
        *(partial(convolve, 1, tokens) for tokens in PROMPTS),
        partial(convolve, DECODES, 1),
        *(partial(copy, pairs) for pairs in (4, DECODES)),
        *(
            partial(update, f"update_{kind}", rolling)
            for kind in ("gated_delta", f"gated_delta{BY_CHANNEL}", "mamba2")
            for rolling in (False, True)
        ),
        *(partial(scan, name, tokens, ()) for name in SCANS for tokens in PROMPTS),
        *(partial(scan, name, PROMPTS[1], (2048, 4096, 6144)) for name in SCANS),
    ),
}
