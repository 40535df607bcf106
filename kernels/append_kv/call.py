"""The checked arguments of one append_kv call."""

from typing import NamedTuple

import torch

from kernels.fp8 import Scales
from kernels.layout import KvLayout, PageShape


class AppendCall(NamedTuple):
    """Named as the op names them; `shape` is that of the pages."""

    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slot_mapping: torch.Tensor
    scales: Scales | None
    shape: PageShape
    layout: KvLayout
