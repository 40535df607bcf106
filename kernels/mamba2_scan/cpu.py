"""mamba2_scan on a CPU: a block of 64 tokens in a few products, in fp32 (Dao and Gu, Transformers are SSMs, 2024).

All products have one shape, whatever the block holds: their last bits follow from it.
"""

import torch

from kernels.block_scan import Mamba2Layer, ScanPlan
from kernels.block_scan.cpu import by_head, decays, each_block
from kernels.block_scan.tokens import finished


def mamba2_scan(layer: Mamba2Layer, plan: ScanPlan, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    heads = layer.x.shape[1]

    def compute(tokens: slice, state: torch.Tensor) -> torch.Tensor:
        sizes = layer.steps.sizes(tokens)
        x, b, c = (by_head(rows[tokens], heads) for rows in (layer.x, layer.b, layer.c))
        dt = by_head(sizes, heads)
        sums, left = decays(by_head(sizes * layer.steps.a, heads))
        grown = sums.exp()[:, :, None]
        y = (c @ b.transpose(1, 2) * left * dt[:, None]) @ x + (c * grown) @ state.transpose(1, 2)
        state *= grown[:, -1:]
        state += (x * (left[:, -1] * dt)[:, :, None]).transpose(1, 2) @ b
        return finished(layer, tokens, y.transpose(0, 1)[: tokens.stop - tokens.start])

    each_block(layer.states, plan, out, compute)
