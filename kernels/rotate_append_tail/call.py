"""The checked arguments of one rotate_append_tail call."""

from typing import NamedTuple

import torch

__all__ = ["RotateAppendTailCall"]


class RotateAppendTailCall(NamedTuple):
    """Queries and keys of a layer, where they stand and where the keys go."""

    q: torch.Tensor
    k: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    pages: torch.Tensor
    slot_mapping: torch.Tensor
    norm: torch.Tensor
    eps: float

    @property
    def turned(self) -> int:
        """Elements that turn, the last of a head and of a key."""
        return 2 * self.cos_sin.shape[2]
