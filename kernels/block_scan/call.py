"""What the shared kernels of scans work on: one form for the gated delta rule and for Mamba2's recurrence."""

from typing import NamedTuple

import torch

from kernels.block_scan.plan import ScanPlan


class BlockScan(NamedTuple):
    """For each head and token S <- exp(g) S + weight k v, and the output scale q S.

    q, k      [num_tokens, k_heads, dk]
    v         [num_tokens, heads, dv]; with `inverses` what counts is inverse (beta (v - exp(sum) weight k S)), of the
              state before the block
    inverses  [num_tokens, heads, GRID_TOKENS]: rows of each block's matrix; None: v counts as it is
    beta      [num_tokens, heads], with `inverses` only
    sums      fp32 [num_tokens, heads]: running sums of g within each block; None with `kept`
    weights   fp32 [num_tokens, heads], None: 1
    scores    [num_tokens, heads, GRID_TOKENS]: q k of each token with those of its block, decayed and weighted
    factors   fp32 [num_tokens, heads]: what an output is multiplied by, besides `scale`; None: 1
    states    fp32 [num_slots, heads, dk, dv], or [num_slots, heads, dv, dk] with `by_value`
    skip      [heads] of fp32: the output has skip v besides; None: it has not
    gate      [num_tokens, heads, dv]: the output is multiplied by silu(gate); None: it is not
    kept      [num_tokens, k_heads, dk], with `remains`: a decay for each key channel is in q and k already, by what is
              left of the state before the block, and here in the keys by what is left behind it; None: `sums` say it
    remains   fp32 [max_blocks, k_heads, dk]: what is left of the state behind each block
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    inverses: torch.Tensor | None
    beta: torch.Tensor | None
    sums: torch.Tensor | None
    weights: torch.Tensor | None
    scores: torch.Tensor
    factors: torch.Tensor | None
    states: torch.Tensor
    plan: ScanPlan
    scale: float
    by_value: bool
    skip: torch.Tensor | None
    gate: torch.Tensor | None
    kept: torch.Tensor | None = None
    remains: torch.Tensor | None = None
