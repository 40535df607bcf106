"""gather_latent: the rows of an MLA cache, dense and in the order of their sequences, new tokens behind cached ones.

Lengths stay on the device, the total comes from the host.
"""

import torch

from kernels._checks import (
    KV_DTYPES,
    check_block_tables,
    check_dense_pages,
    check_lengths,
    check_out,
    check_rows,
    check_tensor,
    num_sequences,
)
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.gather_latent import reference

__all__ = ["gather_latent"]


def gather_latent(
    pages: torch.Tensor,
    block_tables: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor,
    total_tokens: int,
    new_latents: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    first_positions: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Rows [total_tokens, width]: of each sequence its cached tokens, read from the pages, then its new ones.

    pages [num_pages, page_tokens, width], each page dense; block_tables int32 [num_seqs, max_pages]; cu_seqlens_k int32
    [num_seqs + 1] counts cached and new tokens, cu_seqlens_q new ones alone; new_latents [num_tokens, width] in the
    pages' dtype. Without them every row comes from the pages. first_positions int32 [num_seqs]: where in each sequence
    to begin (then cu_seqlens_k counts from there), for a context that is read in chunks; a sequence may own nothing.

    total_tokens bounds cu_seqlens_k's end: rows behind that end are not written. Where nothing is cached (total_tokens
    is the number of new tokens) the new rows are returned as they are, the table is not looked at and may be None.
    """
    check_tensor("pages", pages, (None, None, None), KV_DTYPES, pages.device)
    check_dense_pages("pages", pages)
    num_seqs = num_sequences(cu_seqlens_k, "cu_seqlens_k")
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, pages.device)
    if total_tokens < 0:
        raise KernelArgumentError(f"total_tokens: must not be negative, got {total_tokens}")
    _check_new(new_latents, cu_seqlens_q, num_seqs, total_tokens, pages)
    if first_positions is not None:
        check_lengths("first_positions", first_positions, num_seqs, pages.device)
    if out is not None:
        size = (total_tokens, pages.shape[2])
        check_out(out, size, pages.dtype, pages.device, pages=pages, new_latents=new_latents)
    if new_latents is not None and new_latents.shape[0] == total_tokens:
        return new_latents if out is None else out.copy_(new_latents)
    if out is None:
        out = pages.new_empty((total_tokens, pages.shape[2]))
    if total_tokens == 0 or num_seqs == 0:
        return out
    if block_tables is None:
        raise KernelArgumentError("block_tables: cached tokens cannot be found without one, got None")
    check_block_tables(block_tables, num_seqs, pages.device)
    if uses_triton(backend, pages):
        from kernels.gather_latent.triton import launch

        launch(pages, block_tables, cu_seqlens_k, new_latents, cu_seqlens_q, first_positions, out)
    else:
        reference.gather_latent(pages, block_tables, cu_seqlens_k, new_latents, cu_seqlens_q, first_positions, out)
    return out


def _check_new(
    new_latents: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    num_seqs: int,
    total_tokens: int,
    pages: torch.Tensor,
) -> None:
    """New rows and their running sums come together."""
    if new_latents is None and cu_seqlens_q is None:
        return
    if new_latents is None or cu_seqlens_q is None:
        name = "new_latents" if new_latents is None else "cu_seqlens_q"
        raise KernelArgumentError(f"{name}: new rows and their lengths come together, got None")
    check_tensor("new_latents", new_latents, (None, pages.shape[2]), (pages.dtype,), pages.device)
    check_rows("new_latents", new_latents)
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, pages.device)
    if new_latents.shape[0] > total_tokens:
        raise KernelArgumentError(f"total_tokens: {new_latents.shape[0]} rows are new, got {total_tokens}")
