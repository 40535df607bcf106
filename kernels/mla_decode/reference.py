"""mla_decode in plain torch: one sequence after the other, in fp32.

A sequence's result depends on that sequence alone, and so do its bits.
"""

import torch

from kernels.errors import KernelArgumentError
from kernels.mla_decode.call import MlaDecodeCall


def mla_decode(call: MlaDecodeCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fills out, and lse where one is wanted; a sequence without latents gives 0 and leaves its lse alone."""
    q, cu_seqlens_q = call.q, call.cu_seqlens_q
    lengths = call.seqlens_k.tolist()
    bounds = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for seq, length in enumerate(lengths):
        first, stop = bounds[seq], bounds[seq + 1]
        if not 0 <= length <= call.max_seqlen_k or not 0 <= stop - first <= call.max_q_tokens:
            raise KernelArgumentError(
                f"sequence {seq}: {stop - first} queries (max_q_tokens {call.max_q_tokens}) and {length} latents "
                f"(max_seqlen_k {call.max_seqlen_k})"
            )
        if length == 0:
            out[first:stop] = 0.0
            continue
        latents = read_latents(call.pages, call.block_tables[seq], length).float()
        scores = torch.einsum("qhd,kd->hqk", q[first:stop].float() * call.scale, latents)
        position = length - (stop - first) + torch.arange(stop - first, device=q.device)
        hidden = torch.arange(length, device=q.device) > position.unsqueeze(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out[first:stop] = torch.einsum("hqk,kd->qhd", weights, latents[:, : call.latent]).to(out.dtype)
        if lse is not None:
            lse[:, first:stop] = torch.logsumexp(scores, dim=-1)


def read_latents(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows [length, width] of one sequence, by plain indexing."""
    position = torch.arange(length, device=pages.device)
    return pages[table.long()[position // pages.shape[1]], position % pages.shape[1]]
