"""mamba2_scan: Mamba2's recurrence over prompts, block by block, for layers of Bamba, Granite 4, Falcon-H1, Nemotron-H.

For each head a state S [dim, d_state] in fp32, and for each token

    S <- exp(dt a) S + dt x b;  y = S c + skip x,  times silu(gate) where there is one

Rows may be of one token, but `update_mamba2` (kernels/state_update) is made for those.
"""

import torch

from kernels.backend import Backend, choose_backend
from kernels.block_scan import Mamba2Layer, Mamba2Steps, ScanPlan, check_mamba2, check_plan
from kernels.block_scan.hopper import reason_against
from kernels.mamba2_scan import cpu, reference

__all__ = ["Mamba2Steps", "mamba2_scan"]


def mamba2_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    steps: Mamba2Steps,
    states: torch.Tensor,
    plan: ScanPlan,
    *,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns [num_tokens, heads, dim]; reads and writes the states that the plan's slots name.

    x [num_tokens, heads, dim], b and c [num_tokens, groups, d_state], tokens may be slices of wider rows; consecutive
    heads share a group. states fp32 [num_slots, heads, dim, d_state], each slot dense; skip fp32 [heads]; gate as x.
    Outputs of padding rows, and of tokens behind the last row, are zeros.

    Products of 16-bit inputs have 16-bit factors and fp32 sums; states are fp32 all the way.
    """
    layer = Mamba2Layer(x, b, c, steps, states, skip, gate)
    check_mamba2(layer)
    check_plan(plan, x.shape[0], x.device)
    route = choose_backend(backend, x, lambda: reason_against(c, b, x))
    # GPU kernels zero the rows of no sequence; the others write only rows of sequences.
    make = torch.zeros if route is Backend.REFERENCE else torch.empty
    out = make(x.shape, dtype=x.dtype, device=x.device)
    if plan.num_rows == 0 or x.numel() == 0:
        return out.zero_()
    if route is not Backend.REFERENCE:
        _scan_on_gpu(layer, plan, out, route)
    elif backend is Backend.AUTO:
        cpu.mamba2_scan(layer, plan, out)
    else:
        reference.mamba2_scan(layer, plan, out)
    return out


def _scan_on_gpu(layer: Mamba2Layer, plan: ScanPlan, out: torch.Tensor, route: Backend) -> None:
    """Sizes of steps and scores of all blocks first, then states pass and outputs follow."""
    from kernels.mamba2_scan.triton import score

    if route is Backend.GLUON:
        from kernels.block_scan.hopper.launch import launch_scan
    else:
        from kernels.block_scan.triton import launch_scan

    launch_scan(score(layer, plan), out)
