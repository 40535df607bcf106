"""Argument checks that the ops share: shapes, dtypes, strides, devices, overlaps.

Reads only what the host knows, so a check never waits for the device; what lies in device memory (slots, lengths, page
ids) is not checked.
"""

from collections.abc import Sequence

import torch

from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout, PageShape, page_shape, page_tensor_shapes

KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAGE_DTYPES = (*KV_DTYPES, torch.float8_e4m3fn)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Refuses a tensor that has other axes, sizes (None: any), dtype or device than the op works with."""
    sizes = tensor.shape
    if len(sizes) != len(shape) or any(w is not None and w != s for w, s in zip(shape, sizes, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(f"{name}: shape must be [{wanted}], got {list(sizes)}")
    if tensor.dtype not in dtypes:
        raise KernelArgumentError(f"{name}: dtype must be one of {[str(d) for d in dtypes]}, got {tensor.dtype}")
    if tensor.device != device:
        raise KernelArgumentError(f"{name}: must be on {device}, is on {tensor.device}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuses gaps and permuted axes."""
    if not tensor.is_contiguous():
        raise KernelArgumentError(
            f"{name}: must be contiguous, has shape {list(tensor.shape)} and strides {list(tensor.stride())}"
        )


def check_dense(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Refuses what check_tensor refuses, and gaps and permuted axes."""
    check_tensor(name, tensor, shape, dtypes, device)
    check_contiguous(name, tensor)


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuses [tokens, heads, dim] whose last axis has gaps; slices of a fused projection are welcome."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelArgumentError(f"{name}: the last axis must have stride 1, strides are {list(tensor.stride())}")


def check_head_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuses [tokens, heads, dim] with gaps within a token; tokens may be slices of wider rows."""
    check_rows(name, tensor)
    if tensor.numel() and tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]:
        raise KernelArgumentError(f"{name}: a token's heads must be contiguous, strides are {list(tensor.stride())}")


def check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, layout: KvLayout) -> PageShape:
    """Refuses page tensors that do not match each other or the layout; a page is dense, pages may lie apart."""
    shape = page_shape(k_pages, layout)
    k_shape, v_shape = page_tensor_shapes(shape, k_pages.dtype, layout)
    check_tensor("k_pages", k_pages, k_shape, PAGE_DTYPES, k_pages.device)
    check_tensor("v_pages", v_pages, v_shape, (k_pages.dtype,), k_pages.device)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_dense_pages(name, pages)
    return shape


def check_dense_pages(name: str, pages: torch.Tensor) -> None:
    """Refuses gaps within a page and pages that overlap."""
    sizes, strides, width = pages.shape, pages.stride(), 1
    # By hand: a view of a page, to ask it, costs more host time than the whole launch has.
    for axis in range(len(sizes) - 1, 0, -1):
        if sizes[axis] != 1 and strides[axis] != width and pages.numel():
            raise KernelArgumentError(f"{name}: a page must be dense, strides are {list(strides)}")
        width *= sizes[axis]
    if sizes[0] > 1 and strides[0] < width:
        raise KernelArgumentError(f"{name}: pages overlap, strides are {list(strides)}")


def check_block_tables(block_tables: torch.Tensor, num_seqs: int, device: torch.device) -> None:
    """Refuses a table that is not int32 [num_seqs, any] with dense rows."""
    check_tensor("block_tables", block_tables, (num_seqs, None), (torch.int32,), device)
    check_rows("block_tables", block_tables)


def check_lengths(name: str, lengths: torch.Tensor, size: int | None, device: torch.device) -> None:
    """Refuses a vector of lengths or running sums that is not dense int32."""
    check_dense(name, lengths, (size,), (torch.int32,), device)


def check_token_indices(
    positions: torch.Tensor, slot_mapping: torch.Tensor, num_tokens: int, device: torch.device
) -> None:
    """Refuses positions that are not dense int32 or int64 [num_tokens], and slots that are not dense int64."""
    check_dense("positions", positions, (num_tokens,), INDEX_DTYPES, device)
    check_dense("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), device)


def check_appended(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    pages: torch.Tensor,
    key_name: str = "k",
) -> None:
    """Refuses strides, indices and overlaps that an op cannot work with that turns q in place and puts k into slots."""
    check_head_rows("q", q)
    check_rows(key_name, k)
    check_token_indices(positions, slot_mapping, k.shape[0], k.device)
    for name, tensor in (("q", q), (key_name, k)):
        check_disjoint("pages", pages, name, tensor)
    check_page_pair(q, k, "q", key_name)


def num_sequences(cu_seqlens: torch.Tensor, name: str) -> int:
    """Returns how many sequences a vector of running sums describes."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise KernelArgumentError(f"{name}: shape must be [num_seqs + 1], got {list(cu_seqlens.shape)}")
    return cu_seqlens.shape[0] - 1


def check_disjoint(written: str, target: torch.Tensor, read: str, source: torch.Tensor) -> None:
    """Refuses an output whose memory reaches into an input's."""
    if target.numel() == 0 or source.numel() == 0 or target.device != source.device:
        return
    start, stop = _extent(target)
    other_start, other_stop = _extent(source)
    if start < other_stop and other_start < stop:
        raise KernelArgumentError(f"{written}: shares memory with {read}")


def check_out(
    out: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    **inputs: torch.Tensor | None,
) -> None:
    """Refuses an output of another shape or dtype, with gaps, or in the memory of an input."""
    check_dense("out", out, shape, (dtype,), device)
    for name, tensor in inputs.items():
        if tensor is not None:
            check_disjoint("out", out, name, tensor)


def checked_out(
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    **inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Returns `out`, or a new tensor if it is None; refuses what check_out refuses."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_out(out, shape, dtype, device, **inputs)
    return out


def check_page_pair(
    pages: torch.Tensor, others: torch.Tensor, name: str = "k_pages", other_name: str = "v_pages"
) -> None:
    """Refuses two page tensors that overlap; the halves of one [num_pages, 2, ...] tensor do not."""
    if pages.numel() == 0 or others.numel() == 0:
        return
    size, other_size = pages.element_size(), others.element_size()
    stride, other_stride = pages.stride(0) * size, others.stride(0) * other_size
    shift = (others.data_ptr() - pages.data_ptr()) % max(stride, 1)
    width, other_width = pages.numel() // pages.shape[0] * size, others.numel() // others.shape[0] * other_size
    if not (other_stride == stride and width <= shift <= stride - other_width):
        check_disjoint(name, pages, other_name, others)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte behind the last one that the tensor can touch."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()
