"""append_kv: writes the keys and values of new tokens into their slots; rotate_append_kv does what comes before, too.

The scheduler hands out only fresh slots.
"""

import torch

from kernels._checks import (
    PAGE_DTYPES,
    check_contiguous,
    check_disjoint,
    check_page_pair,
    check_pages,
    check_rows,
    check_tensor,
)
from kernels.append_kv import reference
from kernels.append_kv.call import AppendCall
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.fp8 import check_scales, check_written_scales, dense_dtypes
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
    shape = check_pages(k_pages, v_pages, layout, PAGE_DTYPES)
    check_page_pair(k_pages, v_pages)
    tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else None
    check_tensor("slot_mapping", slot_mapping, (tokens,), (torch.int64,), k_pages.device)
    check_contiguous("slot_mapping", slot_mapping)
    for name, rows in (("k", k), ("v", v)):
        check_tensor(name, rows, (tokens, shape.heads, shape.dim), dense_dtypes(k_pages), k_pages.device)
        check_rows(name, rows)
        check_disjoint("k_pages", k_pages, name, rows)
        check_disjoint("v_pages", v_pages, name, rows)
    if v.dtype is not k.dtype:
        raise KernelArgumentError(f"v: dtype must be k's {k.dtype}, got {v.dtype}")
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
