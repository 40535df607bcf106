"""What decoders in training share: embeddings, blocks one after the other, tied logits, and what guidance sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from register_qa.training.layers import Norm, initialise, rotary_table, shrink_outputs


class Inside(NamedTuple):
    """What guidance looks at.

    `middle` is the hidden states half-way up, [batch, length, hidden_size]; `pointing` the scores of one head above,
    from the places asked for to every place of the sequence: [batch, places, length], float32, later places -inf.
    """

    logits: torch.Tensor
    middle: torch.Tensor
    pointing: torch.Tensor


class Block(nn.Module, ABC):
    """hidden [batch, length, hidden_size] and the tables of `length` positions to the next hidden states."""

    @abstractmethod
    def first_head(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, asking: torch.Tensor
    ) -> torch.Tensor:
        """Returns the first query head's scores at some places, [batch, places, length], float32, later places -inf."""


class Decoder(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab_size]; its `state_dict` has Hugging Face's names.

    Guidance looks at the hidden states behind the first half of the blocks; the block above must have attention.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, vocab_size: int, hidden_size: int, blocks: Sequence[Block], norm: Norm, max_positions: int,
        rotary_dim: int, theta: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.model = _Body(vocab_size, hidden_size, blocks, norm)
        cos, sin = rotary_table(max_positions, rotary_dim, theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(initialise)
        shrink_outputs(self, len(blocks))

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers: compiled one by one, and their matrices learn by Muon."""
        return self.model.layers

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._logits_and_middle(token_ids)[0]

    def inside(self, token_ids: torch.Tensor, asking: torch.Tensor) -> Inside:
        """The forward pass, and what guidance needs of it; `asking` is places in the sequences, [batch, places]."""
        logits, middle = self._logits_and_middle(token_ids)
        block = self.model.layers[self._num_lower()]
        assert isinstance(block, Block)
        length = token_ids.shape[1]
        return Inside(logits, middle, block.first_head(middle, self.cos[:length], self.sin[:length], asking))

    def _num_lower(self) -> int:
        return (len(self.model.layers) + 1) // 2

    def _logits_and_middle(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = token_ids.shape[1]
        hidden = self.model.embed_tokens(token_ids)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        cos, sin = self.cos[:length], self.sin[:length]
        middle = hidden
        for number, block in enumerate(self.model.layers, start=1):
            hidden = block(hidden, cos, sin)
            if number == self._num_lower():
                middle = hidden
        return functional.linear(self.model.norm(hidden), self.model.embed_tokens.weight), middle


class _Body(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, blocks: Sequence[Block], norm: Norm) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm


def scores_of_places(q: torch.Tensor, k: torch.Tensor, asking: torch.Tensor) -> torch.Tensor:
    """Returns one head's scores at some places, [batch, places, length], float32; q and k [batch, length, dim]."""
    head_dim = q.shape[-1]
    q = q.gather(1, asking.unsqueeze(-1).expand(-1, -1, head_dim))
    scores = (q @ k.transpose(1, 2)).float() * head_dim**-0.5
    later = torch.arange(k.shape[1], device=k.device) > asking.unsqueeze(-1)
    masked: torch.Tensor = scores.masked_fill(later, -torch.inf)
    return masked
