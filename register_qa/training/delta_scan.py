"""The gated delta rule over whole sequences with gradients, in plain torch: a block of 64 tokens in a few products.

    S <- exp(g) S;  S <- S + k (beta (v - k S));  o = q S

What tokens of a block add to the state solves (I + A) e = beta v - beta exp(G) k S, with A the products of keys, betas
and decays below the diagonal and G the sums of g (Yang et al., Gated Delta Networks, 2025). So a block takes the state
S to M S + N. These maps are composed two by two, so that n blocks take log n steps instead of n.
"""

from __future__ import annotations

import torch
from torch.nn import functional

BLOCK = 64


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gated_delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Returns [batch, heads, length, dv], float32.

    q and k [batch, heads, length, dk], v [batch, heads, length, dv], g (0 or less) and beta [batch, heads, length];
    the caller has scaled q. Not compiled: the number of steps follows from the length, so that each length would be
    a compilation of its own.
    """
    with torch.autocast(q.device.type, enabled=False):
        length = q.shape[2]
        q, k, v = (_in_blocks(rows.float(), length) for rows in (q, k, v))
        g, beta = (_in_blocks(column.float().unsqueeze(-1), length) for column in (g, beta))
        out = _blocks(q, k, v, g.squeeze(-1), beta)
        return out.flatten(2, 3)[:, :, :length]


def _in_blocks(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Returns [batch, heads, blocks, BLOCK, dim]; zeros behind the last token leave a state as it is."""
    padded = functional.pad(rows, (0, 0, 0, -length % BLOCK))
    return padded.view(*padded.shape[:2], -1, BLOCK, padded.shape[-1])


def _blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    sums = g.cumsum(-1)
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu(1)
    left = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    grown = sums.exp().unsqueeze(-1)
    inverse = unit_lower_inverse(((k * beta) @ k.mT * left).tril(-1))
    values, readers = inverse @ (v * beta), inverse @ (k * beta * grown)
    added = (k * left[..., -1, :].unsqueeze(-1)).mT
    kept = grown[..., -1:, :] * torch.eye(k.shape[-1], device=k.device)
    before = _states_before(kept - added @ readers, added @ values)
    return (q * grown) @ before + (q @ k.mT * left) @ (values - readers @ before)


def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """Returns (I + a)^-1 of strictly lower [..., BLOCK, BLOCK].

    Two blocks on the diagonal with what lies between them are one of twice the size: [[X, 0], [B, Y]]^-1 is
    [[X^-1, 0], [-Y^-1 B X^-1, Y^-1]]. Six products of products; powers of a would be far larger numbers.
    """
    place = torch.arange(BLOCK, device=a.device)
    inverse = torch.eye(BLOCK, device=a.device).expand_as(a)
    size = 1
    while size < BLOCK:
        pair, half = place // (2 * size), place // size
        between = (pair[:, None] == pair[None, :]) & (half[:, None] != half[None, :])
        inverse = inverse - inverse @ (a * between) @ inverse
        size *= 2
    return inverse


def _states_before(kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Returns each block's first state, [batch, heads, blocks, dk, dv], from the blocks' maps S -> kept S + added."""
    blocks, step = kept.shape[2], 1
    while step < blocks:
        later = kept[:, :, step:]
        added = torch.cat((added[:, :, :step], later @ added[:, :, :-step] + added[:, :, step:]), dim=2)
        kept = torch.cat((kept[:, :, :step], later @ kept[:, :, :-step]), dim=2)
        step *= 2
    return torch.cat((torch.zeros_like(added[:, :, :1]), added[:, :, :-1]), dim=2)
