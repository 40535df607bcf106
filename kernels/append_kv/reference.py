"""append_kv in plain torch.

Knows nothing of sequences: a slot is all that says where a token goes.
"""

import torch

from kernels.layout import KvLayout, write_slots


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KvLayout,
) -> None:
    """Writes every token whose slot is not negative."""
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    if kept.numel() == slot_mapping.numel():
        write_slots(k, v, k_pages, v_pages, slot_mapping, layout)
    else:
        write_slots(k[kept], v[kept], k_pages, v_pages, slot_mapping[kept], layout)
