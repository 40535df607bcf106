"""Losses that ask inside the model for the two steps of an answer: whose value is this, and where is the one asked for.

A value is of use to an answer only if its place knows whose value it is, and to know that is of use only once answers
look for it: so neither is learnt for a long time. Guidance asks for both directly. It is a help of the early stages,
and thrown away in the end.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from register_qa.training.data import NO_LABEL, Batch

# One place in this many of a sequence gets guidance at most; those beyond are left out.
ASKING_SHARE = 8


def asking_places(batch: Batch) -> torch.Tensor:
    """[sequences, length / ASKING_SHARE]: places where something must be copied next, then others."""
    count = batch.sources.shape[1] // ASKING_SHARE
    return (batch.sources != NO_LABEL).int().topk(count, dim=1).indices


def pointing_loss(scores: torch.Tensor, asking: torch.Tensor, batch: Batch) -> torch.Tensor:
    """One head of the upper half looks from each asking place to the token that must be copied."""
    wanted = batch.sources.gather(1, asking)
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=NO_LABEL)


class SubjectProbe(nn.Module):
    """Two linear maps, for the two words of a subject's name, from hidden states to tokens of the vocabulary."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self._norm = nn.RMSNorm(hidden_size, elementwise_affine=False)
        self.first = nn.Linear(hidden_size, vocab_size, bias=False)
        self.last = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, middle: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean loss over the tokens that tell of a subject; `middle` is [sequences, length, hidden_size]."""
        normed = self._norm(middle.float()).flatten(0, 1)
        of_first = _loss(self.first(normed), batch.first_words)
        return (of_first + _loss(self.last(normed), batch.last_words)) / 2


def _loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), words.flatten(), ignore_index=NO_LABEL)
