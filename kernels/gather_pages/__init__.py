"""gather_pages and scatter_pages: between paged and dense keys and values, by sequence.

Lengths stay on the device, the total comes from the host.
"""

import torch

from kernels._checks import check_block_tables, check_lengths, check_page_pair, check_pages, num_sequences
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.fp8 import check_scales, check_written_rows, check_written_scales, dense_dtypes
from kernels.gather_pages import reference
from kernels.gather_pages.call import MoveCall
from kernels.layout import KvLayout

__all__ = ["gather_pages", "scatter_pages"]


def gather_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    total_tokens: int,
    *,
    out_dtype: torch.dtype | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense (k, v) [total_tokens, heads, dim]: all tokens of sequence 0, then of sequence 1, ...

    block_tables int32 [num_seqs, max_pages]; cu_seqlens_k int32 [num_seqs + 1] ends at total_tokens. out_dtype is the
    pages' own (None), or a wider one for fp8 e4m3 pages, which then need their scales: fp32 [1] or fp32 [num_pages,
    heads, page_tokens].
    """
    shape = check_pages(k_pages, v_pages, layout)
    num_seqs = num_sequences(cu_seqlens_k, "cu_seqlens_k")
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, k_pages.device)
    check_block_tables(block_tables, num_seqs, k_pages.device)
    if total_tokens < 0:
        raise KernelArgumentError(f"total_tokens: must not be negative, got {total_tokens}")
    size = (total_tokens, shape.heads, shape.dim)
    dtype = k_pages.dtype if out_dtype is None else out_dtype
    if dtype not in dense_dtypes(k_pages):
        raise KernelArgumentError(f"out_dtype: {k_pages.dtype} pages do not give {dtype}")
    scales = check_scales(k_scales, v_scales, k_pages, dtype, shape)
    out = (k_pages.new_empty(size, dtype=dtype), v_pages.new_empty(size, dtype=dtype))
    if total_tokens == 0 or num_seqs == 0:
        return out
    call = MoveCall(*out, k_pages, v_pages, block_tables, cu_seqlens_k, scales, shape, layout)
    if uses_triton(backend, k_pages):
        from kernels.gather_pages.triton import launch

        launch(call, gather=True)
    else:
        reference.gather_pages(call)
    return out


def scatter_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    backend: Backend = Backend.AUTO,
) -> None:
    """The inverse of gather_pages: dense tokens into the slots of their sequences.

    Where two sequences share a page, both must bring the same bytes for it. fp8 e4m3 pages also take wider k, v and
    then need scales: fp32 [1], which are read, or fp32 [num_pages, heads, page_tokens], which are written.
    """
    shape = check_pages(k_pages, v_pages, layout)
    check_page_pair(k_pages, v_pages)
    num_seqs = num_sequences(cu_seqlens_k, "cu_seqlens_k")
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, k_pages.device)
    check_block_tables(block_tables, num_seqs, k_pages.device)
    check_written_rows(k, v, k_pages, v_pages, (k.shape[0], shape.heads, shape.dim))
    scales = check_scales(k_scales, v_scales, k_pages, k.dtype, shape)
    check_written_scales(scales, k, v)
    if k.numel() == 0 or num_seqs == 0:
        return
    call = MoveCall(k, v, k_pages, v_pages, block_tables, cu_seqlens_k, scales, shape, layout)
    if uses_triton(backend, k_pages):
        from kernels.gather_pages.triton import launch

        launch(call, gather=False)
    else:
        reference.scatter_pages(call)
