"""append_kv: writes the keys and values of new tokens into their slots; rotate_append_kv does what comes before, too.

The scheduler hands out only fresh slots.
"""

import torch

from kernels._checks import check_dense, check_page_pair, check_pages
from kernels.append_kv import reference
from kernels.append_kv.call import AppendCall
from kernels.backend import Backend, uses_triton
from kernels.fp8 import check_scales, check_written_rows, check_written_scales
from kernels.layout import KvLayout
from kernels.rotate_append_kv import RotatedQueries, rotate_append_kv

__all__ = ["RotatedQueries", "append_kv", "rotate_append_kv"]


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    backend: Backend = Backend.AUTO,
) -> None:
    """Puts k[t] and v[t] into slot slot_mapping[t]; a negative slot is skipped, as padding is.

    k, v [num_tokens, heads, dim] in the pages' dtype; slot_mapping int64 [num_tokens], page_id * page_tokens +
    offset. Two tokens must not name one slot. fp8 e4m3 pages also take wider k, v and then need scales: fp32 [1],
    which are read, or fp32 [num_pages, heads, page_tokens], which are written (k, v must be finite). Quantized values
    are rounded to nearest and saturate.
    """
    shape = check_pages(k_pages, v_pages, layout)
    check_page_pair(k_pages, v_pages)
    tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else None
    check_dense("slot_mapping", slot_mapping, (tokens,), (torch.int64,), k_pages.device)
    check_written_rows(k, v, k_pages, v_pages, (tokens, shape.heads, shape.dim))
    scales = check_scales(k_scales, v_scales, k_pages, k.dtype, shape)
    check_written_scales(scales, k, v)
    if k.numel() == 0:
        return
    call = AppendCall(k, v, k_pages, v_pages, slot_mapping, scales, shape, layout)
    if uses_triton(backend, k_pages):
        from kernels.append_kv.triton import launch

        launch(call)
    else:
        reference.append_kv(call)
