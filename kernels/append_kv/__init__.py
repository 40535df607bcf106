"""append_kv: writes the keys and values of new tokens into their slots.

Does not know which sequence a token belongs to, nor whether its page is shared: the scheduler hands out only fresh
slots.
"""

import torch

from kernels._checks import check_contiguous, check_disjoint, check_page_pair, check_pages, check_rows, check_tensor
from kernels.append_kv import reference
from kernels.backend import Backend, uses_triton
from kernels.layout import KvLayout

__all__ = ["append_kv"]


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: KvLayout = KvLayout.NHD,
    backend: Backend = Backend.AUTO,
) -> None:
    """Puts k[t] and v[t] into slot slot_mapping[t]; a negative slot is skipped, as padding is.

    k, v [num_tokens, heads, dim] in the pages' dtype; slot_mapping int64 [num_tokens], page_id * page_tokens +
    offset. Two tokens must not name one slot.
    """
    shape = check_pages(k_pages, v_pages, layout)
    check_page_pair(k_pages, v_pages)
    tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else None
    check_tensor("slot_mapping", slot_mapping, (tokens,), (torch.int64,), k_pages.device)
    check_contiguous("slot_mapping", slot_mapping)
    for name, rows in (("k", k), ("v", v)):
        check_tensor(name, rows, (tokens, shape.heads, shape.dim), (k_pages.dtype,), k_pages.device)
        check_rows(name, rows)
        check_disjoint("k_pages", k_pages, name, rows)
        check_disjoint("v_pages", v_pages, name, rows)
    if k.numel() == 0:
        return
    if uses_triton(backend, k_pages):
        from kernels.append_kv.kernel import launch

        launch(k, v, k_pages, v_pages, slot_mapping, shape, layout)
    else:
        reference.append_kv(k, v, k_pages, v_pages, slot_mapping, layout)
