"""The checked arguments of one compress_tokens call."""

from typing import NamedTuple

import torch

from kernels.key_rows import KeyRows

__all__ = ["CompressCall", "EntryRule"]


class EntryRule(NamedTuple):
    """How an entry is made of the raw rows of `ratio` tokens, or with overlap of twice as many."""

    ratio: int
    overlap: bool
    bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    cos_sin: torch.Tensor

    @property
    def turned(self) -> int:
        """Elements of an entry that turn, its last ones."""
        return 2 * self.cos_sin.shape[2]


class CompressCall(NamedTuple):
    """Raw rows of a launch, where they go, and where entries go."""

    raw: torch.Tensor
    raw_pages: torch.Tensor
    raw_slots: torch.Tensor
    raw_tables: torch.Tensor
    rows: KeyRows
    entry_pages: torch.Tensor
    entry_tables: torch.Tensor
    rule: EntryRule
