"""update_gated_delta, update_mamba2: the recurrences over few tokens for each row, in decode and short extends.

A row's tokens go one after the other, so how they are cut into launches changes no bit, nor does the rest of the batch.
A scan sums the same terms block by block: it continues what an update has left, and the other way round, and agrees
with it to within rounding. Each program holds a part of a state from its first token to its last.
"""

import torch

from kernels._checks import check_lengths, num_sequences
from kernels.backend import Backend, uses_triton
from kernels.block_scan import GatedDeltaLayer, Mamba2Layer, Mamba2Steps, check_gated_delta, check_mamba2
from kernels.errors import KernelArgumentError
from kernels.state_slots import StateSlots, check_slots
from kernels.state_update import reference

__all__ = ["Mamba2Steps", "update_gated_delta", "update_mamba2"]


def update_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    slots: StateSlots,
    *,
    scale: float | None = None,
    norm_eps: float | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns what `gated_delta_scan` does, [num_tokens, heads, dv], for rows of few tokens.

    cu_seqlens_q int32 [num_rows + 1]; a row's last state goes to its rolling slot too, `leave_*` must be empty. Factors
    of products are fp32.
    """
    layer = GatedDeltaLayer(q, k, v, g, beta, states, k.shape[-1] ** -0.5 if scale is None else scale, norm_eps)
    check_gated_delta(layer)
    _check_rows(cu_seqlens_q, slots, v.device)
    out = v.new_empty(v.shape)
    if slots.num_rows == 0 or v.numel() == 0:
        return out.zero_()
    if uses_triton(backend, v):
        from kernels.state_update.triton import launch_gated_delta

        launch_gated_delta(layer, cu_seqlens_q, slots, out)
    else:
        reference.update_gated_delta(layer, cu_seqlens_q, slots, out)
    return out


def update_mamba2(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    steps: Mamba2Steps,
    states: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    slots: StateSlots,
    *,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns what `mamba2_scan` does, [num_tokens, heads, dim], for rows of few tokens; as `update_gated_delta`."""
    layer = Mamba2Layer(x, b, c, steps, states, skip, gate)
    check_mamba2(layer)
    _check_rows(cu_seqlens_q, slots, x.device)
    out = x.new_empty(x.shape)
    if slots.num_rows == 0 or x.numel() == 0:
        return out.zero_()
    if uses_triton(backend, x):
        from kernels.state_update.triton import launch_mamba2

        launch_mamba2(layer, cu_seqlens_q, slots, out)
    else:
        reference.update_mamba2(layer, cu_seqlens_q, slots, out)
    return out


def _check_rows(cu_seqlens_q: torch.Tensor, slots: StateSlots, device: torch.device) -> None:
    num_rows = num_sequences(cu_seqlens_q, "cu_seqlens_q")
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_rows + 1, device)
    check_slots(slots, num_rows, device)
    if slots.num_leaves:
        raise KernelArgumentError(f"slots.leave_row: an update leaves no state within a row, got {slots.num_leaves}")
