"""gated_delta_scan in plain torch: the rule itself, one token after the other, in fp32."""

from functools import partial

import torch

from kernels.block_scan import GatedDeltaLayer, ScanPlan
from kernels.block_scan.cpu import each_block
from kernels.block_scan.tokens import delta_tokens


def gated_delta_scan(layer: GatedDeltaLayer, plan: ScanPlan, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    each_block(layer.states, plan, out, partial(delta_tokens, layer))
