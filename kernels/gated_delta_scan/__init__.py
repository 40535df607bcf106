"""gated_delta_scan: the gated delta rule over prompts, block by block (Qwen3-Next, Qwen3.5, Kimi Linear).

For each head a state S [dk, dv] in fp32, and for each token

    S <- exp(g) S;  S <- S + k (beta (v - k S));  o = scale q S

where g is a number, or one for each row of S (Kimi Delta Attention: a decay for each channel of the keys).

Rows may be of one token, but `update_gated_delta` (kernels/state_update) is made for those.
"""

import torch

from kernels.backend import Backend, choose_backend
from kernels.block_scan import GatedDeltaLayer, ScanPlan, check_gated_delta, check_plan
from kernels.gated_delta_scan import cpu, reference
from kernels.gated_delta_scan.hopper import reason_against

__all__ = ["gated_delta_scan"]


def gated_delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    plan: ScanPlan,
    *,
    scale: float | None = None,
    norm_eps: float | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns [num_tokens, heads, dv]; reads and writes the states that the plan's slots name.

    q and k [num_tokens, k_heads, dk], v [num_tokens, heads, dv], tokens may be slices of wider rows; consecutive heads
    of v share one of k. g (0 or less) and beta [num_tokens, heads] of any float dtype, g [num_tokens, heads, dk] with a
    decay for each key channel. states fp32 [num_slots, heads, dk, dv], each slot dense. scale None: 1 /
    sqrt(dk). With norm_eps q and k are divided by the root of their sum of squares plus norm_eps. Outputs of padding
    rows, and of tokens behind the last row, are zeros.

    Products of 16-bit inputs have 16-bit factors and fp32 sums; states are fp32 all the way.
    """
    layer = GatedDeltaLayer(q, k, v, g, beta, states, k.shape[-1] ** -0.5 if scale is None else scale, norm_eps)
    check_gated_delta(layer)
    check_plan(plan, v.shape[0], v.device)
    route = choose_backend(backend, v, lambda: reason_against(layer))
    # GPU kernels zero the rows of no sequence; the others write only rows of sequences.
    make = torch.zeros if route is Backend.REFERENCE else torch.empty
    out = make(v.shape, dtype=v.dtype, device=v.device)
    if plan.num_rows == 0 or v.numel() == 0:
        return out.zero_()
    if route is not Backend.REFERENCE:
        _scan_on_gpu(layer, plan, out, route)
    elif backend is Backend.AUTO:
        cpu.gated_delta_scan(layer, plan, out)
    else:
        reference.gated_delta_scan(layer, plan, out)
    return out


def _scan_on_gpu(layer: GatedDeltaLayer, plan: ScanPlan, out: torch.Tensor, route: Backend) -> None:
    """Each block is made a plain sum of products first, then states pass and outputs follow."""
    if route is Backend.GLUON:
        from kernels.block_scan.hopper.launch import launch_scan
        from kernels.gated_delta_scan.hopper.launch import solve
    else:
        from kernels.block_scan.triton import launch_scan

        if layer.by_channel:
            from kernels.gated_delta_scan.channels.triton import solve
        else:
            from kernels.gated_delta_scan.triton import solve

    launch_scan(solve(layer, plan), out)
