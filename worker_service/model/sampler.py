"""Next tokens from logits, a batch of rows with different sampling parameters at once, without a copy to the host.

The randomness of a row is a pure function of its seed, its position and the token id, so a repeated request with the
same seed draws the same tokens in any batch and on any worker.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WORD = 0xFFFFFFFF
_LONG_WORD = 0xFFFFFFFFFFFFFFFF
# 2^64 over the golden ratio: keeps small seeds and positions away from 0, which the mixers leave as it is.
_ODD = 0x9E3779B97F4A7C15
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


class SamplingTensors(NamedTuple):
    """One value per row, on the device: fp32, keys int64, the others int32.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalty 1 are off. `history_rows` and `history_tokens` pair
    up: the tokens that a row's repetition penalty concerns.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    penalty: torch.Tensor
    key_low: torch.Tensor
    key_high: torch.Tensor
    history_rows: torch.Tensor
    history_tokens: torch.Tensor


class Flags(NamedTuple):
    """Which parts of the sampler no row asks for, so that they need not run; known on the host."""

    any_random: bool
    any_filter: bool
    any_penalty: bool
    num_logprobs: int  # most that any row asks for: -1 = no row asks, 0 = only the sampled token's


class Sampled(NamedTuple):
    """Tokens int64 [rows]; the others fp32 and only if asked for: [rows], and [rows, num_logprobs]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    top_tokens: torch.Tensor | None
    top_logprobs: torch.Tensor | None


def sample(logits: torch.Tensor, params: SamplingTensors, flags: Flags) -> Sampled:
    """One token per row of fp32 logits [rows, vocab_size].

    Log-probabilities are the model's own: before penalties, temperature and filters.
    """
    scores = _penalised(logits, params) if flags.any_penalty else logits
    tokens = scores.argmax(dim=-1)  # of equals the lowest index
    if flags.any_random:
        tokens = torch.where(params.temperature > 0, _drawn(scores, params, flags), tokens)
    if flags.num_logprobs < 0:
        return Sampled(tokens, None, None, None)
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    count = flags.num_logprobs
    if count == 0:
        return Sampled(tokens, chosen, None, None)
    # Stable, so that equal scores rank by token id here as well.
    ranked = logprobs.sort(dim=-1, descending=True, stable=True)
    return Sampled(tokens, chosen, ranked.indices[:, :count], ranked.values[:, :count])


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words hashed from (seed, position): flipping any input bit flips about half of theirs."""
    mixed = _mix64(_mix64(seed + _ODD & _LONG_WORD) + (position + 1) * _ODD & _LONG_WORD)
    return mixed & _WORD, mixed >> 32


def _penalised(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Repetition penalty (CTRL).

    Of tokens in the history, positive scores are divided by it, negative ones multiplied.
    """
    places = (params.history_rows, params.history_tokens)
    scores = logits[places]
    penalty = params.penalty[params.history_rows]
    return logits.index_put(places, torch.where(scores < 0, scores * penalty, scores / penalty))


def _drawn(scores: torch.Tensor, params: SamplingTensors, flags: Flags) -> torch.Tensor:
    """Gumbel-max sampling: the argmax of log p + Gumbel noise is a draw from p; no running sum that could round."""
    # Greedy rows run along with temperature 1; their draw is not used.
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)
    scaled = scores / temperature.unsqueeze(1)
    if flags.any_filter:
        scaled = _filtered(scaled, params)
    return (scaled + _gumbel(params, scores.shape[-1])).argmax(dim=-1)


def _filtered(scores: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """top-k, then top-p of the rest, then min-p: removed tokens get -inf. The best token always stays."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    top_k = torch.where(params.top_k > 0, params.top_k, scores.shape[-1]).unsqueeze(1)
    kept = ranked.values.masked_fill(ranks >= top_k, -torch.inf)
    probabilities = kept.softmax(dim=-1)
    # A token stays while those before it have not reached the mass: the one that reaches it is the last.
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    out_of_mass = (before >= params.top_p.unsqueeze(1)) & (params.top_p.unsqueeze(1) < 1.0)
    too_small = probabilities < params.min_p.unsqueeze(1) * probabilities[:, :1]
    kept = kept.masked_fill((out_of_mass | too_small) & (ranks > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(1, ranked.indices, kept)


def _gumbel(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """Gumbel noise [rows, vocab_size] by a counter-based hash: it does not depend on the other rows of the batch."""
    token_ids = torch.arange(vocab_size, device=params.key_low.device)
    words = _mix32(token_ids ^ params.key_low.unsqueeze(1))
    words = _mix32((words + params.key_high.unsqueeze(1)) & _WORD)
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-uniform))


def _mix32(words: torch.Tensor) -> torch.Tensor:
    """Xor-shifts and odd multiplications of 32-bit words in int64 lanes: products may wrap, the low bits stay true."""
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & _WORD
    words = ((words ^ (words >> 15)) * 0x846CA68B) & _WORD
    return words ^ (words >> 16)


def _mix64(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _LONG_WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _LONG_WORD
    return word ^ (word >> 31)
