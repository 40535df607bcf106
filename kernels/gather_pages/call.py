"""The checked arguments of one gather_pages or scatter_pages call."""

from typing import NamedTuple

import torch

from kernels.fp8 import Scales
from kernels.layout import KvLayout, PageShape


class MoveCall(NamedTuple):
    """Named as the ops name them: k and v are the dense tokens, `shape` is that of the pages."""

    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_k: torch.Tensor
    scales: Scales | None
    shape: PageShape
    layout: KvLayout
