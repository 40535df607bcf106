"""The checked arguments of one rotate_append_latent call."""

from typing import NamedTuple

import torch

__all__ = ["RotateAppendLatentCall"]


class RotateAppendLatentCall(NamedTuple):
    """A layer's queries and latents, where they stand and where the latents go."""

    q: torch.Tensor
    kv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor | None
    pages: torch.Tensor
    slot_mapping: torch.Tensor
    norm: torch.Tensor
    eps: float

    @property
    def latent(self) -> int:
        """Elements of a row that are normalised."""
        return self.norm.shape[0]

    @property
    def rope(self) -> int:
        """Elements that turn, of a head of q and of a row; without a table those that could."""
        return self.kv.shape[1] - self.latent if self.cos_sin is None else 2 * self.cos_sin.shape[2]
