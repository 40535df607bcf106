"""A softmax that is not finished: what mla_prefill stores after some of the keys and goes on from with the next ones.

Knows no kernel. Everything is fp32, so going on gives the bits that never stopping gives.
"""

from typing import NamedTuple

import torch

__all__ = ["AttentionState"]


class AttentionState(NamedTuple):
    """acc [num_tokens, heads, 128]; [heads, num_tokens] the peak of a row's scaled base-2 scores, and its sum."""

    acc: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, heads: int, device: torch.device | str) -> "AttentionState":
        """Room for a state; its contents mean nothing until an attention has stored one."""
        acc = torch.empty((tokens, heads, 128), dtype=torch.float32, device=device)
        peak, total = (torch.empty((heads, tokens), dtype=torch.float32, device=device) for _ in range(2))
        return cls(acc, peak, total)
