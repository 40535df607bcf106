"""What a row's token depends on besides its logits: sampling parameters, and the tokens that its penalties count."""

from typing import NamedTuple

import torch


class SamplingTensors(NamedTuple):
    """One value per row: fp32, keys int64, top_k and slots int32.

    temperature 0 is greedy; top_k 0 (or the vocabulary and more), top_p 1, min_p 0, repetition 1, presence 0 and
    frequency 0 are off. A key is two 32-bit words. slots names the row of TokenCounts.counts; -1: no penalties.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    key_low: torch.Tensor
    key_high: torch.Tensor
    slots: torch.Tensor


class TokenCounts(NamedTuple):
    """The tokens of sequences with penalties, and a launch's newest token of each row, which may not be among them yet.

    counts     int32 [num_slots, vocab_size + 1]: twice the number of times that a token was generated, plus 1 if the
               prompt has it; in the last column how many tokens of the sequence are counted
    token_ids  int32 [num_tokens]: the launch's tokens
    positions  int32 [num_tokens]: where they stand in their sequences
    rows       int32 [num_rows]: which of these tokens each sampled row continues from
    """

    counts: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
