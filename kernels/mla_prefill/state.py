"""The state of an unfinished softmax: mla_prefill stores it after some of the keys and continues with the next ones.

All of it is fp32, so stopping and continuing changes no bit.
"""

from typing import NamedTuple

import torch

__all__ = ["AttentionState"]


class AttentionState(NamedTuple):
    """fp32 acc [num_tokens, heads, value]; row_max and row_sum [heads, num_tokens].

    row_max is what weights are relative to, in log2 units: the largest scaled score, on Hopper one not far from it.
    """

    acc: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, heads: int, value: int, device: torch.device | str) -> "AttentionState":
        """Room for a state; its contents mean nothing until an attention has stored one."""
        acc = torch.empty((tokens, heads, value), dtype=torch.float32, device=device)
        row_max, row_sum = (torch.empty((heads, tokens), dtype=torch.float32, device=device) for _ in range(2))
        return cls(acc, row_max, row_sum)

    @staticmethod
    def num_bytes(tokens: int, heads: int, value: int) -> int:
        """Returns what a state takes."""
        return 4 * tokens * heads * (value + 2)
