"""mamba2_scan in plain torch: the recurrence itself, one token after the other, in fp32."""

from functools import partial

import torch

from kernels.block_scan import Mamba2Layer, ScanPlan
from kernels.block_scan.cpu import each_block
from kernels.block_scan.tokens import ssd_tokens


def mamba2_scan(layer: Mamba2Layer, plan: ScanPlan, out: torch.Tensor) -> None:
    """Fills out and writes the states."""
    each_block(layer.states, plan, out, partial(ssd_tokens, layer))
