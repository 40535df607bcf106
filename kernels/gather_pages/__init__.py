"""gather_pages and scatter_pages: between paged and dense keys and values, by sequence.

Neither knows what the tokens mean or who reads them next; lengths stay on the device, the total comes from the host.
"""

import torch

from kernels._checks import (
    check_block_tables,
    check_disjoint,
    check_lengths,
    check_page_pair,
    check_pages,
    check_rows,
    check_tensor,
    num_sequences,
)
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.gather_pages import reference
from kernels.layout import KvLayout

__all__ = ["gather_pages", "scatter_pages"]


def gather_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    total_tokens: int,
    *,
    layout: KvLayout = KvLayout.NHD,
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense (k, v) [total_tokens, heads, dim]: all tokens of sequence 0, then of sequence 1, ...

    block_tables int32 [num_seqs, max_pages]; cu_seqlens_k int32 [num_seqs + 1] ends at total_tokens.
    """
    shape = check_pages(k_pages, v_pages, layout)
    num_seqs = num_sequences(cu_seqlens_k, "cu_seqlens_k")
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, k_pages.device)
    check_block_tables(block_tables, num_seqs, k_pages.device)
    if total_tokens < 0:
        raise KernelArgumentError(f"total_tokens: must not be negative, got {total_tokens}")
    size = (total_tokens, shape.heads, shape.dim)
    out = (k_pages.new_empty(size), v_pages.new_empty(size))
    if total_tokens == 0 or num_seqs == 0:
        return out
    if uses_triton(backend, k_pages):
        from kernels.gather_pages.kernel import launch_gather

        launch_gather(k_pages, v_pages, block_tables, cu_seqlens_k, out, shape, layout)
    else:
        reference.gather_pages(k_pages, v_pages, block_tables, cu_seqlens_k, out, layout)
    return out


def scatter_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    layout: KvLayout = KvLayout.NHD,
    backend: Backend = Backend.AUTO,
) -> None:
    """The inverse of gather_pages: dense tokens into the slots of their sequences.

    Where two sequences share a page, both must bring the same bytes for it.
    """
    shape = check_pages(k_pages, v_pages, layout)
    check_page_pair(k_pages, v_pages)
    num_seqs = num_sequences(cu_seqlens_k, "cu_seqlens_k")
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, k_pages.device)
    check_block_tables(block_tables, num_seqs, k_pages.device)
    for name, rows in (("k", k), ("v", v)):
        check_tensor(name, rows, (k.shape[0], shape.heads, shape.dim), (k_pages.dtype,), k_pages.device)
        check_rows(name, rows)
        check_disjoint("k_pages", k_pages, name, rows)
        check_disjoint("v_pages", v_pages, name, rows)
    if k.numel() == 0 or num_seqs == 0:
        return
    if uses_triton(backend, k_pages):
        from kernels.gather_pages.kernel import launch_scatter

        launch_scatter(k, v, k_pages, v_pages, block_tables, cu_seqlens_k, shape, layout)
    else:
        reference.scatter_pages(k, v, k_pages, v_pages, block_tables, cu_seqlens_k, layout)
