"""mla_decode on a CPU: torch's scaled_dot_product_attention, one query after the other.

The latents that a query sees decide the shape of each product and of each sum, so its bits depend neither on other
sequences nor on how many queries its own has. Rows are passed as keys and as values: the rotary part of a result is
computed and dropped, which costs less than a copy.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.errors import KernelArgumentError
from kernels.mla_decode.call import MlaDecodeCall


def reason_against(call: MlaDecodeCall, lse: torch.Tensor | None) -> str | None:
    """Returns why the reference has to take the case; None where this does."""
    if call.q.device.type != "cpu" or call.q.dtype is not torch.float32:
        return "queries and pages must be fp32 on a CPU"
    return None if lse is None else "no lse"


def mla_decode(call: MlaDecodeCall, out: torch.Tensor) -> None:
    """Fills out; a query that sees no latent gives 0."""
    page_tokens, width = call.pages.shape[1:]
    lengths = call.seqlens_k.tolist()
    bounds = list(range(len(lengths) + 1)) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for seq, length in enumerate(lengths):
        first, stop = bounds[seq : seq + 2]
        if not 0 <= length <= call.max_seqlen_k or not 0 <= stop - first <= call.max_q_tokens:
            raise KernelArgumentError(
                f"sequence {seq}: {stop - first} queries (max_q_tokens {call.max_q_tokens}) and {length} latents "
                f"(max_seqlen_k {call.max_seqlen_k})"
            )
        table = call.block_tables[seq, : -(-length // page_tokens)]
        rows = call.pages.index_select(0, table).view(1, 1, -1, width)
        for query in range(first, stop):
            seen = rows[:, :, : max(length - (stop - 1 - query), 0)]
            out[query] = _attended(call.q[query], seen, call.scale)[:, : call.latent]


def _attended(q: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention [heads, width] of one query of all heads over rows [1, 1, tokens, width]."""
    if rows.shape[2] == 0:
        return torch.zeros_like(q)
    return scaled_dot_product_attention(q[None, None], rows, rows, scale=scale)[0, 0]
