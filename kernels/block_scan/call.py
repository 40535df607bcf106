"""What the shared kernels of scans work on: one form for the gated delta rule and for Mamba2's recurrence."""

from typing import NamedTuple

import torch

from kernels.block_scan.plan import ScanPlan


class BlockScan(NamedTuple):
    """For each head and token S <- exp(g) S + weight k v, and the output scale q S.

    q, k      [num_tokens, k_heads, dk], divided by their length where there is a `norm_eps`
    v         [num_tokens, heads, dv]; with `readers` what is left of it when a block's state has been read is written
              back: v - readers S
    readers   [num_tokens, heads, dk], None: nothing is read
    sums      fp32 [num_tokens, heads]: running sums of g within each block
    weights   fp32 [num_tokens, heads], None: 1
    states    fp32 [num_slots, heads, dk, dv], or [num_slots, heads, dv, dk] with `by_value`
    skip      [heads] of fp32: the output has skip v besides; None: it has not
    gate      [num_tokens, heads, dv]: the output is multiplied by silu(gate); None: it is not
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    readers: torch.Tensor | None
    sums: torch.Tensor
    weights: torch.Tensor | None
    states: torch.Tensor
    plan: ScanPlan
    scale: float
    norm_eps: float | None
    by_value: bool
    skip: torch.Tensor | None
    gate: torch.Tensor | None
