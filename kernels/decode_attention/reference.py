"""decode_attention in plain torch: one token after the other, in fp32.

A token's result depends on its sequence alone, and so do its bits.
"""

import torch

from kernels.attention import LEAST_EXPONENT, AttentionSpec, float_span, visible_start
from kernels.decode_attention.call import DecodeCall
from kernels.errors import KernelArgumentError


def decode_attention(call: DecodeCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fills out, and lse where one is wanted; a token without keys gives 0 and a lse of minus infinity."""
    q, spec, sinks, cu_seqlens_q = call.q, call.spec, call.sinks, call.cu_seqlens_q
    columns = None if sinks is None else sinks.float().view(spec.shape.heads, -1, 1)
    starts = list(range(call.num_seqs + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for seq, length in enumerate(call.seqlens_k.tolist()):
        tokens = starts[seq + 1] - starts[seq]
        if not 0 <= length <= call.max_seqlen_k:
            raise KernelArgumentError(
                f"seqlens_k: sequence {seq} has {length} keys, max_seqlen_k is {call.max_seqlen_k}"
            )
        if not 0 <= tokens <= call.max_q_tokens:
            raise KernelArgumentError(
                f"cu_seqlens_q: sequence {seq} has {tokens} tokens, max_q_tokens is {call.max_q_tokens}"
            )
        for token in range(tokens):
            row, keys_seen = starts[seq] + token, length - tokens + token + 1
            if length == 0 or keys_seen <= 0:
                out[row] = 0.0
                if lse is not None:
                    lse[:, row] = float("-inf")
                continue
            low = visible_start(keys_seen - 1, spec.window)
            keys, values = float_span(call.k_pages, call.v_pages, call.block_tables[seq], low, keys_seen, spec)
            out[row] = _attend(q[row].float(), keys, values, spec, columns, None if lse is None else lse[:, row])


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one query [q_heads, dim] over keys and values [length, kv_heads, dim]: it sees them all.

    Sinks [kv_heads, group, 1] are one more score of each head, whose value is zero. Fills `lse` [q_heads] where it is
    wanted.
    """
    scores = torch.bmm((q * spec.scale).view(keys.shape[1], -1, q.shape[1]), keys.permute(1, 2, 0))
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks], dim=-1)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, dim=-1).flatten())
    least = scores.amax(dim=-1, keepdim=True) + LEAST_EXPONENT
    weights = torch.softmax(torch.maximum(scores, least), dim=-1)
    return torch.bmm(weights[..., : keys.shape[0]], values.transpose(0, 1)).view(q.shape)
