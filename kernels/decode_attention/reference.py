"""decode_attention in plain torch: one token after the other, in fp32.

Knows nothing of batches: a token's result depends on its sequence alone, and so do its bits.
"""

import torch

from kernels.attention import LEAST_EXPONENT, AttentionSpec, visible_start
from kernels.errors import KernelArgumentError
from kernels.fp8 import ScaleKind
from kernels.layout import read_span


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_k: int,
    max_q_tokens: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fills out, and lse where one is wanted; a token without keys gives 0 and a lse of minus infinity."""
    columns = None if sinks is None else sinks.float().view(spec.shape.heads, -1, 1)
    starts = list(range(len(seqlens_k) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for seq, length in enumerate(seqlens_k.tolist()):
        tokens = starts[seq + 1] - starts[seq]
        if not 0 <= length <= max_seqlen_k:
            raise KernelArgumentError(f"seqlens_k: sequence {seq} has {length} keys, max_seqlen_k is {max_seqlen_k}")
        if not 0 <= tokens <= max_q_tokens:
            raise KernelArgumentError(
                f"cu_seqlens_q: sequence {seq} has {tokens} tokens, max_q_tokens is {max_q_tokens}"
            )
        for token in range(tokens):
            row, keys_seen = starts[seq] + token, length - tokens + token + 1
            if length == 0 or keys_seen <= 0:
                out[row] = 0.0
                if lse is not None:
                    lse[:, row] = float("-inf")
                continue
            low = visible_start(keys_seen - 1, spec.window)
            keys, values = _numbers(k_pages, v_pages, block_tables[seq], low, keys_seen, spec)
            out[row] = _attend(q[row].float(), keys, values, spec, columns, None if lse is None else lse[:, row])


def _numbers(
    k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, start: int, stop: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at one sequence's positions, fp32 [stop - start, kv_heads, dim]; codes times their scales."""
    keys, values = (part.float() for part in read_span(k_pages, v_pages, table, start, stop, spec.layout))
    if spec.scales is None:
        return keys, values
    k_scales, v_scales, kind = spec.scales
    if kind is ScaleKind.PER_TENSOR:
        return keys * k_scales, values * v_scales
    position = torch.arange(start, stop, device=table.device)
    page, slot = table[position // spec.shape.page_tokens].long(), position % spec.shape.page_tokens
    return keys * k_scales[page, :, slot].unsqueeze(-1), values * v_scales[page, :, slot].unsqueeze(-1)


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
