"""prefill_attention: new tokens attend to the cached prefix and to each other, all read from pages.

Does not know which tokens were cached, fetched or just computed: their keys and values were appended before.
"""

from typing import Literal, overload

import torch

from kernels._checks import check_lengths, num_sequences
from kernels.attention import check_attention, check_triton_attention, empty_lse, output_for
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout
from kernels.prefill_attention import reference

__all__ = ["prefill_attention"]


@overload
def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    out: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor: ...


@overload
def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    out: torch.Tensor | None = None,
    return_lse: Literal[True],
    backend: Backend = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    layout: KvLayout = KvLayout.NHD,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention, bottom-right aligned: query i of a sequence with c cached tokens stands at position c + i.

    q [num_tokens, q_heads, dim]; cu_seqlens_q, cu_seqlens_k int32 [num_seqs + 1], k counts cached + new; max_seqlen_q
    is the longest sequence's number of queries. A key at j is visible to the query at i iff i - window < j <= i
    (window 0: iff j <= i); pages of keys that no query of the batch sees are never read. sinks fp32 or bf16 [q_heads]
    are logits that take part in each row's softmax, once and whatever the window, and have no value. Returns out like
    q, and with return_lse also the natural log-sum-exp, sink included, fp32 [q_heads, num_tokens]. A token's result
    has the same bits however its prompt was cut.
    """
    num_seqs = num_sequences(cu_seqlens_q, "cu_seqlens_q")
    spec = check_attention(q, k_pages, v_pages, block_tables, num_seqs, layout, scale, window, sinks)
    check_lengths("cu_seqlens_q", cu_seqlens_q, num_seqs + 1, q.device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, num_seqs + 1, q.device)
    if max_seqlen_q < 0:
        raise KernelArgumentError(f"max_seqlen_q: must not be negative, got {max_seqlen_q}")
    result = output_for(q, out, k_pages, v_pages, sinks)
    lse = empty_lse(q) if return_lse else None
    if q.shape[0] and num_seqs and max_seqlen_q:
        args = (q, k_pages, v_pages, block_tables, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, spec, sinks, result, lse)
        if uses_triton(backend, q):
            check_triton_attention(q, spec)
            from kernels.prefill_attention.kernel import launch

            launch(*args)
        else:
            reference.prefill_attention(*args)
    return result if lse is None else (result, lse)
