"""What training asks of a model, whatever its layers are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import nn


class Inside(NamedTuple):
    """What guidance looks at.

    `middle` is the hidden states half-way up, [batch, length, hidden_size]; `pointing` the scores of one head above,
    from the places asked for to every place of the sequence: [batch, places, length], float32, later places -inf.
    """

    logits: torch.Tensor
    middle: torch.Tensor
    pointing: torch.Tensor


class Trainable(nn.Module, ABC):
    """Token ids [batch, length] to logits [batch, length, vocab_size], causal. `state_dict` is what serving reads."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The layers: compiled one by one, and their matrices learn by Muon."""

    @abstractmethod
    def inside(self, token_ids: torch.Tensor, asking: torch.Tensor) -> Inside:
        """The forward pass, and what guidance needs of it; `asking` is places in the sequences, [batch, places]."""
