"""Rotary position embedding in plain torch."""

import torch


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, dim] turned in fp32 by cos, sin [num_tokens, 1, rotary_dim / 2]; what lies behind stays."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    a, b = first.float(), second.float()
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)


def turned_tail(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, dim] with its last elements turned in fp32, neighbours with each other, by cos, sin
    [num_tokens, 1, rotary_dim / 2]; what lies before stays."""
    turned = 2 * cos.shape[-1]
    even, odd = x[..., -turned::2].float(), x[..., 1 - turned :: 2].float()
    tail = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-turned], tail.to(x.dtype)), dim=-1)
