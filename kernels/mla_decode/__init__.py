"""mla_decode: absorbed latent attention; queries in the latents' own space attend to paged latents.

How a sequence is cut follows from its own length, with cu_seqlens_q from positions alone: so its bits never depend on
other requests, nor, among calls with cu_seqlens_q, on how many queries they have. Calls with and without cu_seqlens_q
differ in the last bits.
"""

import torch

from kernels._checks import check_block_tables, check_lengths, check_out
from kernels.attention import check_lse, check_tensor_core_dtype
from kernels.backend import Backend, choose_backend
from kernels.errors import KernelArgumentError
from kernels.latent_dims import check_latent_queries, check_latent_tiles
from kernels.mla_decode import cpu, reference
from kernels.mla_decode.call import MlaDecodeCall
from kernels.mla_decode.hopper import reason_against
from kernels.mla_decode.plan import MlaDecodePlan

__all__ = ["LATENT", "MlaDecodePlan", "mla_decode"]

LATENT = 512


def mla_decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    scale: float,
    latent: int = LATENT,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_tokens: int = 1,
    max_seqlen_k: int | None = None,
    plan: MlaDecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Attention of q [num_tokens, heads, latent + rope] over rows of pages [num_pages, page_tokens, latent + rope].

    A row is a key, and its first `latent` elements are the value. seqlens_k int32 [num_seqs] counts the new tokens,
    whose latents were appended before; 0 marks a padding row (out 0, lse -inf). cu_seqlens_q int32 [num_seqs + 1] and
    the bound max_q_tokens where a sequence has more than one query, or where its one is to have the bits that it has
    among several; a sequence's last query sees all latents, the one before it one less. max_seqlen_k is a bound (None:
    what a row of the block table holds); it sizes the launch, never the result. `scale` belongs to the unabsorbed head,
    so it has no default. plan is this step's, made for that bound or a higher one and prepared with the same seqlens_k
    and cu_seqlens_q, which are then not read again; without one the op makes its own. Returns out [num_tokens, heads,
    latent]; lse, fp32 [heads, num_tokens], is filled with the natural log-sum-exp.
    """
    room = block_tables.shape[1] * pages.shape[1] if block_tables.dim() == 2 and pages.dim() == 3 else 0
    bound = room if max_seqlen_k is None else max_seqlen_k
    call = MlaDecodeCall(q, pages, block_tables, seqlens_k, bound, cu_seqlens_q, max_q_tokens, scale, latent)
    _check(call)
    check_lse(lse, q)
    tokens, heads, _ = q.shape
    if not 0 <= bound <= room:
        raise KernelArgumentError(f"max_seqlen_k: must be in 0..{room}, what the block table holds, got {bound}")
    if plan is not None:
        plan.check(call.num_seqs, bound, heads, None if cu_seqlens_q is None else max_q_tokens)
    if out is None:
        out = q.new_zeros((tokens, heads, latent))
    else:
        check_out(out, (tokens, heads, latent), q.dtype, q.device, q=q, pages=pages)
    if lse is not None:
        lse.fill_(float("-inf"))  # rows of no sequence
    if tokens and heads and call.num_seqs:
        _compute(call, backend, plan, out, lse)
    return out


def _compute(
    call: MlaDecodeCall, backend: Backend, plan: MlaDecodePlan | None, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    route = choose_backend(backend, call.q, lambda: reason_against(call))
    if route is not Backend.REFERENCE:
        check_tensor_core_dtype(call.q)
    if route is Backend.GLUON:
        from kernels.mla_decode.hopper.launch import launch as launch_gluon

        launch_gluon(call, plan, out, lse)
    elif route is Backend.TRITON:
        from kernels.mla_decode.triton import launch

        check_latent_tiles(call.pages, call.latent)
        launch(call, out, lse)
    elif backend is Backend.AUTO and cpu.reason_against(call, lse) is None:
        cpu.mla_decode(call, out)
    else:
        reference.mla_decode(call, out, lse)


def _check(call: MlaDecodeCall) -> None:
    """Refuses what no implementation can work with."""
    q, pages, seqlens_k, cu_seqlens_q = call.q, call.pages, call.seqlens_k, call.cu_seqlens_q
    check_latent_queries(q, pages, call.latent)
    if pages.shape[1] == 0 or pages.shape[1] & (pages.shape[1] - 1):
        raise KernelArgumentError(f"pages: page_tokens must be a power of two, got {pages.shape[1]}")
    num_seqs = seqlens_k.shape[0] if seqlens_k.dim() == 1 else 0
    check_lengths("seqlens_k", seqlens_k, num_seqs, q.device)
    check_block_tables(call.block_tables, num_seqs, q.device)
    if cu_seqlens_q is not None:
        check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, q.device)
    elif q.shape[0] != num_seqs or call.max_q_tokens != 1:
        raise KernelArgumentError(
            f"q: {q.shape[0]} tokens (max_q_tokens {call.max_q_tokens}) of {num_seqs} sequences need cu_seqlens_q"
        )
    if call.max_q_tokens < 1:
        raise KernelArgumentError(f"max_q_tokens: must be positive, got {call.max_q_tokens}")
