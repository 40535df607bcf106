"""pack_pages and unpack_pages: whole pages, as raw bytes, into one dense row each and back.

This is how pages are staged for a spill and put back after a fetch: in one launch, all layers at once, straight to or
from pinned host memory if the rows lie there.
"""

import torch

from kernels._checks import INDEX_DTYPES, check_dense, check_disjoint
from kernels.backend import Backend, uses_triton
from kernels.byte_planes import byte_planes
from kernels.copy_pages import reference
from kernels.errors import KernelArgumentError

__all__ = ["pack_pages", "page_row_bytes", "unpack_pages"]


def page_row_bytes(pages: torch.Tensor, page_axis: int = 0) -> int:
    """Bytes of one page over all planes: the width of a packed row."""
    return byte_planes(pages, "pages", page_axis, "page_axis")[:, :1].numel()


def pack_pages(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    page_axis: int = 0,
    backend: Backend = Backend.AUTO,
) -> None:
    """out[i] = the bytes of page page_ids[i], plane after plane.

    pages: contiguous, any dtype, `page_axis` counts its pages; the axes before it are planes (layers, K and V), so
    [num_layers, num_pages, ...] has page_axis 1. out uint8 [n, page_row_bytes(pages, page_axis)], on the pages' device
    or, beside a CUDA device, in pinned host memory, which the bytes reach when the stream does; page_ids int32 or int64
    [n].
    """
    planes, rows = _checked(pages, page_ids, out, page_axis)
    check_disjoint("out", out, "pages", pages)
    if rows.numel() == 0:
        return
    if uses_triton(backend, pages):
        from kernels.copy_pages.triton import launch

        launch(planes, page_ids, rows, pack=True, on_host=pages.is_cuda and not out.is_cuda)
    else:
        reference.pack_pages(planes, page_ids, rows)


def unpack_pages(
    packed: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    *,
    page_axis: int = 0,
    backend: Backend = Backend.AUTO,
) -> None:
    """The inverse of pack_pages: page page_ids[i] = the bytes packed[i]; no id may occur twice."""
    planes, rows = _checked(pages, page_ids, packed, page_axis)
    check_disjoint("pages", pages, "packed", packed)
    if rows.numel() == 0:
        return
    if uses_triton(backend, pages):
        from kernels.copy_pages.triton import launch

        launch(planes, page_ids, rows, pack=False, on_host=pages.is_cuda and not packed.is_cuda)
    else:
        reference.unpack_pages(rows, planes, page_ids)


def _checked(
    pages: torch.Tensor, page_ids: torch.Tensor, packed: torch.Tensor, page_axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    planes = byte_planes(pages, "pages", page_axis, "page_axis")
    count, _, width = planes.shape
    check_dense("page_ids", page_ids, (None,), INDEX_DTYPES, pages.device)
    on_host = pages.is_cuda and not packed.is_cuda
    if on_host and not packed.is_pinned():
        raise KernelArgumentError(f"packed rows: must be on {pages.device} or in pinned host memory, are pageable")
    device = packed.device if on_host else pages.device
    check_dense("packed rows", packed, (page_ids.shape[0], count * width), (torch.uint8,), device)
    return planes, packed.view(page_ids.shape[0], count, width)
