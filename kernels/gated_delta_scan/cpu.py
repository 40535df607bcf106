"""gated_delta_scan on a CPU: a block of 64 tokens in a few products, in fp32.

Within a block the errors e = beta (v - k S) that tokens add to the state depend on those before them: they solve
(I + A) e = beta v - beta exp(G) k S, with A the products of keys, beta and decays below the diagonal and G the running
sums of g (Yang et al., Gated Delta Networks, 2025). All products have one shape, whatever the block holds: their last
bits follow from it.
"""

import torch

from kernels.block_scan import GatedDeltaLayer, ScanPlan
from kernels.block_scan.cpu import by_head, channel_decays, each_block, head_decays
from kernels.block_scan.tokens import unit


def gated_delta_scan(layer: GatedDeltaLayer, plan: ScanPlan, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    heads, value_dim = layer.v.shape[1:]
    decays = channel_decays if layer.by_channel else head_decays

    def compute(tokens: slice, state: torch.Tensor) -> torch.Tensor:
        q = by_head(unit(layer.q[tokens].float(), layer.norm_eps), heads) * layer.scale
        k = by_head(unit(layer.k[tokens].float(), layer.norm_eps), heads)
        beta = by_head(layer.beta[tokens], heads)[:, :, None]
        grown, kept, products = decays(by_head(layer.g[tokens], heads))
        both = torch.cat((by_head(layer.v[tokens], heads) * beta, k * (beta * grown)), dim=2)
        # The diagonal is taken as ones, what is above it is not read.
        solved = torch.linalg.solve_triangular(products(k * beta, k), both, upper=False, unitriangular=True)
        errors = solved[:, :, :value_dim] - solved[:, :, value_dim:] @ state
        rows: torch.Tensor = (q * grown) @ state + products(q, k) @ errors
        state *= grown[:, -1, :, None]
        state += (k * kept).transpose(1, 2) @ errors
        return rows.transpose(0, 1)[: tokens.stop - tokens.start]

    each_block(layer.states, plan, out, compute)
