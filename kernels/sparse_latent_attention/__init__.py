"""sparse_latent_attention: absorbed latent attention over chosen rows of each query's sequence.

A row's sums run over its chosen latents in the order given, in tiles and pieces of fixed sizes, so its bits depend
neither on how its prompt was cut nor on other requests.
"""

import torch

from kernels._checks import check_dense, checked_out
from kernels.attention import check_tensor_core_dtype
from kernels.backend import Backend, choose_backend
from kernels.errors import KernelArgumentError
from kernels.key_rows import KeyRows, check_key_rows
from kernels.latent_dims import check_latent_queries, check_latent_tiles
from kernels.sparse_latent_attention import cpu, reference
from kernels.sparse_latent_attention.call import SparseLatentCall
from kernels.sparse_latent_attention.hopper import reason_against

__all__ = ["sparse_latent_attention"]


def sparse_latent_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    rows: KeyRows,
    chosen: torch.Tensor,
    *,
    scale: float,
    latent: int,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Attention of q [num_tokens, heads, latent + rope] over rows of pages [num_pages, page_tokens, latent + rope].

    A row of pages is a key, and its first `latent` elements are the value. chosen int32 [num_tokens, k] has the
    positions that a query attends to, min(rows.num_keys, k) of them first; block_tables int32 [num_seqs, any]. A query
    that sees no key gives 0. `scale` belongs to the unabsorbed head, so it has no default. Returns
    [num_tokens, heads, latent].
    """
    call = SparseLatentCall(q, pages, block_tables, rows, chosen, scale, latent)
    _check(call)
    tokens, heads, _ = q.shape
    out = checked_out(out, (tokens, heads, latent), q.dtype, q.device, q=q, pages=pages)
    if tokens == 0 or heads == 0:
        return out
    route = choose_backend(backend, q, lambda: reason_against(call))
    if route is Backend.GLUON:
        from kernels.sparse_latent_attention.hopper.launch import launch as launch_gluon

        launch_gluon(call, out)
    elif route is Backend.TRITON:
        from kernels.sparse_latent_attention.triton import launch

        check_tensor_core_dtype(q)
        check_latent_tiles(pages, latent)
        launch(call, out)
    elif backend is Backend.AUTO and cpu.reason_against(call) is None:
        cpu.sparse_latent_attention(call, out)
    else:
        reference.sparse_latent_attention(call, out)
    return out


def _check(call: SparseLatentCall) -> None:
    """Refuses what no implementation can work with."""
    q, chosen = call.q, call.chosen
    check_latent_queries(q, call.pages, call.latent)
    check_key_rows(call.rows, q.shape[0], call.block_tables, q.device)
    check_dense("chosen", chosen, (q.shape[0], None), (torch.int32,), q.device)
    if chosen.shape[1] == 0:
        raise KernelArgumentError("chosen: must have room for at least one position")
