"""mla_decode: absorbed latent attention; queries in the latents' own space attend to paged latents.

Does not know the projections: what turned a query into a latent one, and what turns the result back. How a sequence is
cut is a function of positions alone, so its bits never depend on its mates, nor, among calls with cu_seqlens_q, on how
many queries they have. Without it, up to 16 heads take a kernel of their own, whose last bits are its own as well.
"""

from typing import Literal, overload

import torch

from kernels._checks import (
    KV_DTYPES,
    check_block_tables,
    check_contiguous,
    check_dense_pages,
    check_disjoint,
    check_lengths,
    check_tensor,
)
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.mla_decode import reference
from kernels.mla_decode.plan import MlaDecodePlan, Tree, tree_of

__all__ = ["LATENT", "WIDTH", "MlaDecodePlan", "Tree", "mla_decode", "tree_of"]

LATENT = 512
WIDTH = 576


@overload
def mla_decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    max_seqlen_k: int | None = None,
    plan: MlaDecodePlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor: ...


@overload
def mla_decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    max_seqlen_k: int | None = None,
    plan: MlaDecodePlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[True],
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def mla_decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    max_seqlen_k: int | None = None,
    plan: MlaDecodePlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [num_tokens, heads, 512 + 64] over pages [num_pages, page_tokens, 576], read as keys and values.

    seqlens_k int32 [num_seqs] counts the new tokens, whose latents were appended before; 0 marks a padding row (out 0,
    lse -inf). cu_seqlens_q int32 [num_seqs + 1] and the bound max_q_tokens where a sequence has more than one query, or
    where its one is to have the bits that it has among several; a sequence's last query sees all latents, the one
    before it one less. max_seqlen_k is a bound (None: what a row of the block table holds); it sizes the launch, never
    the result. `scale` belongs to the unabsorbed head, so it has no default. plan is this step's, prepared with the
    same seqlens_k and cu_seqlens_q, whose numbers are then read there; without one the op makes its own.
    Returns out [num_tokens, heads, 512], still latent, and with return_lse also the natural log-sum-exp, fp32
    [heads, num_tokens].
    """
    _check(q, pages, block_tables, seqlens_k, cu_seqlens_q, max_q_tokens)
    tokens, heads, _ = q.shape
    room = block_tables.shape[1] * pages.shape[1]
    bound = room if max_seqlen_k is None else max_seqlen_k
    if not 0 <= bound <= room:
        raise KernelArgumentError(f"max_seqlen_k: must be in 0..{room}, what the block table holds, got {bound}")
    if out is None:
        out = q.new_zeros((tokens, heads, LATENT))
    else:
        check_tensor("out", out, (tokens, heads, LATENT), (q.dtype,), q.device)
        check_contiguous("out", out)
        check_disjoint("out", out, "q", q)
        check_disjoint("out", out, "pages", pages)
    lse = torch.full((heads, tokens), float("-inf"), device=q.device) if return_lse else None
    if tokens and heads and seqlens_k.shape[0]:
        where = (block_tables, seqlens_k, cu_seqlens_q)
        if uses_triton(backend, q):
            _launch(q, pages, *where, max_q_tokens, bound, scale, plan, out, lse)
        else:
            reference.mla_decode(q, pages, *where, max_q_tokens, bound, scale, out, lse)
    return out if lse is None else (out, lse)


def _launch(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_q_tokens: int,
    bound: int,
    scale: float,
    plan: MlaDecodePlan | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Gluon where it can, by a plan; Triton elsewhere."""
    from kernels.mla_decode.triton import launch

    where = (block_tables, seqlens_k, cu_seqlens_q)
    if q.is_cuda:
        if q.dtype not in KV_DTYPES[:2]:
            raise KernelArgumentError(f"q: dtype must be one of {[str(d) for d in KV_DTYPES[:2]]}, got {q.dtype}")
        from kernels.mla_decode import hopper

        if hopper.can_attend(q, pages):
            num_seqs, heads = seqlens_k.shape[0], q.shape[1]
            most = None if cu_seqlens_q is None else max_q_tokens
            if plan is None:
                plan = MlaDecodePlan(num_seqs, bound, heads, max_q_tokens=most, device=q.device)
                plan.prepare(seqlens_k, cu_seqlens_q)
            plan.check(num_seqs, bound, heads, most)
            hopper.attend(q, pages, block_tables, cu_seqlens_q is not None, plan, scale, out, lse)
            return
    launch(q, pages, *where, max_q_tokens, bound, scale, out, lse)


def _check(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_q_tokens: int,
) -> None:
    """Refuses what no implementation can work with."""
    check_tensor("pages", pages, (None, None, WIDTH), KV_DTYPES, pages.device)
    check_dense_pages("pages", pages)
    if pages.shape[1] == 0 or pages.shape[1] & (pages.shape[1] - 1):
        raise KernelArgumentError(f"pages: page_tokens must be a power of two, got {pages.shape[1]}")
    check_tensor("q", q, (None, None, WIDTH), (pages.dtype,), pages.device)
    check_contiguous("q", q)
    num_seqs = seqlens_k.shape[0] if seqlens_k.dim() == 1 else 0
    check_lengths("seqlens_k", seqlens_k, num_seqs, q.device)
    check_block_tables(block_tables, num_seqs, q.device)
    if cu_seqlens_q is not None:
        check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, q.device)
    elif q.shape[0] != num_seqs or max_q_tokens != 1:
        raise KernelArgumentError(
            f"q: {q.shape[0]} tokens (max_q_tokens {max_q_tokens}) of {num_seqs} sequences need cu_seqlens_q"
        )
    if max_q_tokens < 1:
        raise KernelArgumentError(f"max_q_tokens: must be positive, got {max_q_tokens}")
