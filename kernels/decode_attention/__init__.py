"""decode_attention: one new token of each sequence attends to all of that sequence's pages.

Does not know the batch: how a sequence is split is a function of its own length, so its bits never depend on its mates.
"""

from typing import Literal, overload

import torch

from kernels._checks import check_lengths
from kernels.attention import check_attention, check_triton_attention, empty_lse, output_for
from kernels.backend import Backend, uses_triton
from kernels.decode_attention import reference
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout

__all__ = ["decode_attention"]


@overload
def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    out: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor: ...


@overload
def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    out: torch.Tensor | None = None,
    return_lse: Literal[True],
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [num_seqs, q_heads, dim], the last token of each sequence, over its seqlens_k keys.

    seqlens_k int32 [num_seqs] counts the new token, whose key was appended before; 0 marks a padding row (out 0, lse
    -inf). max_seqlen_k is a host-known bound (None: what a row of the block table holds); it sizes the launch, never
    the result. sinks fp32 or bf16 [q_heads] are logits that take part in each row's softmax, once, and have no value.
    Returns out like q, and with return_lse also the natural log-sum-exp, sink included, fp32 [q_heads, num_seqs].
    """
    num_seqs = q.shape[0]
    spec = check_attention(q, k_pages, v_pages, block_tables, num_seqs, layout, scale, window, sinks)
    check_lengths("seqlens_k", seqlens_k, num_seqs, q.device)
    room = block_tables.shape[1] * spec.shape.page_tokens
    bound = room if max_seqlen_k is None else max_seqlen_k
    if not 0 <= bound <= room:
        raise KernelArgumentError(f"max_seqlen_k: must be in 0..{room}, what the block table holds, got {bound}")
    result = output_for(q, out, k_pages, v_pages, sinks)
    lse = empty_lse(q) if return_lse else None
    if num_seqs:
        args = (q, k_pages, v_pages, block_tables, seqlens_k, bound, spec, sinks, result, lse)
        if uses_triton(backend, q):
            check_triton_attention(q, spec)
            from kernels.decode_attention.kernel import launch

            launch(*args)
        else:
            reference.decode_attention(*args)
    return result if lse is None else (result, lse)
