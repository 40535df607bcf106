"""decode_attention in plain torch: one sequence after the other, in fp32.

Knows nothing of batches: a sequence's result depends on that sequence alone, and so do its bits.
"""

import torch

from kernels.attention import LEAST_EXPONENT, AttentionSpec, visible_start
from kernels.errors import KernelArgumentError
from kernels.layout import read_span


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fills out, and lse where one is wanted; a sequence without keys gives 0 and leaves its lse at minus infinity."""
    columns = None if sinks is None else sinks.float().view(spec.shape.heads, -1, 1)
    for seq, length in enumerate(seqlens_k.tolist()):
        if not 0 <= length <= max_seqlen_k:
            raise KernelArgumentError(f"seqlens_k: sequence {seq} has {length} keys, max_seqlen_k is {max_seqlen_k}")
        if length == 0:
            out[seq] = 0.0
            continue
        low = visible_start(length - 1, spec.window)
        keys, values = read_span(k_pages, v_pages, block_tables[seq], low, length, spec.layout)
        queries = q[seq].float() * spec.scale
        out[seq] = _attend(queries, keys.float(), values.float(), columns, None if lse is None else lse[:, seq])


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, lse: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one query [q_heads, dim] over keys and values [length, kv_heads, dim]: it sees them all.

    Sinks [kv_heads, group, 1] are one more score of each head, whose value is zero. Fills `lse` [q_heads] where it is
    wanted.
    """
    scores = torch.bmm(q.view(keys.shape[1], -1, q.shape[1]), keys.permute(1, 2, 0))
    if sinks is not None:
        scores = torch.cat([scores, sinks], dim=-1)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, dim=-1).flatten())
    least = scores.amax(dim=-1, keepdim=True) + LEAST_EXPONENT
    weights = torch.softmax(torch.maximum(scores, least), dim=-1)
    return torch.bmm(weights[..., : keys.shape[0]], values.transpose(0, 1)).view(q.shape)
