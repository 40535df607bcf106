"""mamba2_scan in plain torch: the recurrence itself, one token after the other, in fp32."""

import torch

from kernels.block_scan import Mamba2Layer, ScanPlan
from kernels.block_scan.cpu import each_block
from kernels.block_scan.tokens import finished, ssd_tokens


def mamba2_scan(layer: Mamba2Layer, plan: ScanPlan, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    group = layer.x.shape[1] // layer.b.shape[1]

    def compute(tokens: slice, state: torch.Tensor) -> None:
        b, c = (rows[tokens].float().repeat_interleave(group, 1) for rows in (layer.b, layer.c))
        x, dt = layer.x[tokens].float(), layer.steps.sizes(tokens)
        y = ssd_tokens(c, b, x, dt, dt * layer.steps.a, state)
        out[tokens] = finished(y, x, layer.skip, None if layer.gate is None else layer.gate[tokens])

    each_block(layer.states, plan, compute)
