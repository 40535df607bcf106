"""append_kv in plain torch.

A slot is all that says where a token goes.
"""

import torch

from kernels.fp8 import Scales
from kernels.fp8.reference import write_rows
from kernels.layout import KvLayout


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: Scales | None,
    layout: KvLayout,
) -> None:
    """Writes every token whose slot is not negative."""
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    if kept.numel() != slot_mapping.numel():
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    write_rows(k, v, k_pages, v_pages, slot_mapping, scales, layout)
