"""append_kv in plain torch.

A slot is all that says where a token goes.
"""

from kernels.append_kv.call import AppendCall
from kernels.fp8.reference import write_rows


def append_kv(call: AppendCall) -> None:
    """Writes every token whose slot is not negative."""
    k, v, slot_mapping = call.k, call.v, call.slot_mapping
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    if kept.numel() != slot_mapping.numel():
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    write_rows(k, v, call.k_pages, call.v_pages, slot_mapping, call.scales, call.layout)
