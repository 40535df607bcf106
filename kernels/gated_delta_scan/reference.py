"""gated_delta_scan in plain torch: the rule itself, one token after the other, in fp32."""

import torch

from kernels.block_scan import GatedDeltaLayer, ScanPlan
from kernels.block_scan.cpu import each_block
from kernels.block_scan.tokens import delta_tokens, unit


def gated_delta_scan(layer: GatedDeltaLayer, plan: ScanPlan, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    group = layer.v.shape[1] // layer.k.shape[1]

    def compute(tokens: slice, state: torch.Tensor) -> None:
        q, k = (unit(rows[tokens].float(), layer.norm_eps).repeat_interleave(group, 1) for rows in (layer.q, layer.k))
        gates = layer.g[tokens].float(), layer.beta[tokens].float()
        out[tokens] = delta_tokens(q * layer.scale, k, layer.v[tokens].float(), *gates, state)

    each_block(layer.states, plan, compute)
