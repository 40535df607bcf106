"""Latent attention over chosen tokens, absorbed for prompts and decode alike: one rule, so that a token's bits depend
neither on cuts nor on which tokens were decoded (ADR 28)."""

import torch

from kernels.backend import Backend
from kernels.head_linear import head_linear
from kernels.key_rows import KeyRows
from kernels.latent_dims import check_latent_dims
from kernels.mla.absorb import absorbed_queries
from kernels.sparse_latent_attention import sparse_latent_attention


def mla_sparse(
    q: torch.Tensor,
    pages: torch.Tensor,
    kv_b: torch.Tensor,
    block_tables: torch.Tensor,
    rows: KeyRows,
    chosen: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns [num_tokens, heads, value]: q, pages and kv_b as in mla_extend, the rest as in
    sparse_latent_attention."""
    dims, heads = check_latent_dims(q, pages, kv_b), q.shape[1]
    matrices = kv_b.view(heads, dims.nope + dims.value, dims.latent)
    attended = sparse_latent_attention(
        absorbed_queries(q, matrices, dims, backend),
        pages,
        block_tables,
        rows,
        chosen,
        scale=dims.head**-0.5 if scale is None else float(scale),
        latent=dims.latent,
        backend=backend,
    )
    out = q.new_empty((q.shape[0], heads, dims.value)) if out is None else out
    return head_linear(attended, matrices[:, dims.nope :].transpose(1, 2), out, backend=backend)
