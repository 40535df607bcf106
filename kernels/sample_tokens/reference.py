"""sample_tokens in plain torch; it waits for the device where the tensors are not on the CPU."""

import torch

from kernels.sample_tokens.params import SamplingTensors, TokenCounts

_WORD = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
# Probabilities are summed as integers of this unit: any order gives the same sum.
MASS_UNIT = 2.0**44


def sample_tokens(logits: torch.Tensor, params: SamplingTensors, counts: TokenCounts | None, out: torch.Tensor) -> None:
    scores = logits.float()
    if counts is not None and (at := _rows(params.slots >= 0)).numel():
        scores = scores.index_copy(
            0, at, penalised(scores[at], _at(params, at), _counted(params.slots[at], at, counts))
        )
    if not bool((params.temperature > 0).all()):
        out.copy_(scores.argmax(dim=-1))  # of equals the lowest index
    at = _rows(params.temperature > 0)
    if at.numel() == out.numel():
        out.copy_(drawn(scores, params))
    elif at.numel():
        out[at] = drawn(scores[at], _at(params, at)).to(out.dtype)


def penalised(scores: torch.Tensor, params: SamplingTensors, counts: torch.Tensor) -> torch.Tensor:
    """The repetition penalty (CTRL) divides positive and multiplies negative scores of tokens that were there before.

    Then `presence` and, for each occurrence, `frequency` are subtracted, for generated tokens only.
    """
    repetition, presence, frequency = (
        value.unsqueeze(1) for value in (params.repetition, params.presence, params.frequency)
    )
    weighed = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(counts > 0, weighed, scores)
    generated = counts >> 1
    return scores - generated.float() * frequency - (generated > 0) * presence


def drawn(scores: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Gumbel-max sampling: the argmax of log p + Gumbel noise is a draw from p; no running sum that could round."""
    scaled = scores / params.temperature.unsqueeze(1)
    in_use = (params.top_k > 0) & (params.top_k < scores.shape[-1]) | (params.top_p < 1.0) | (params.min_p > 0.0)
    at = _rows(in_use)
    if at.numel() == scaled.shape[0]:
        scaled = filtered(scaled, params)
    elif at.numel():
        scaled.index_copy_(0, at, filtered(scaled[at], _at(params, at)))
    return scaled.add_(_gumbel(params, scores.shape[-1])).argmax(dim=-1)


def filtered(scores: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """top-k, then top-p of the rest, then min-p: removed tokens get -inf. The best token always stays."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    top_k = torch.where(params.top_k > 0, params.top_k, scores.shape[-1]).unsqueeze(1)
    kept = ranked.values.masked_fill(ranks >= top_k, -torch.inf)
    shares = (kept - kept[:, :1]).exp_()  # of the best token's probability
    masses = (shares * MASS_UNIT).long()
    before = masses.cumsum(dim=-1)
    total = before[:, -1:].double()
    # A token stays while those before it have not reached the mass: the one that reaches it is the last.
    limit = (params.top_p.unsqueeze(1).double() * total).ceil().long()
    is_removed = (before.sub_(masses) >= limit) & (params.top_p.unsqueeze(1) < 1.0)
    is_removed |= shares < params.min_p.unsqueeze(1)
    is_removed[:, 0] = False
    return torch.empty_like(scores).scatter_(1, ranked.indices, kept.masked_fill_(is_removed, -torch.inf))


def _counted(slots: torch.Tensor, at: torch.Tensor, counts: TokenCounts) -> torch.Tensor:
    """Counts each row's newest token, unless it is counted. Returns the counts int32 [rows, vocab_size]."""
    at = counts.rows[at].long()
    slots, newest, positions = slots.long(), counts.token_ids[at].long(), counts.positions[at]
    is_new = counts.counts[slots, -1] == positions
    counts.counts.index_put_((slots, newest), 2 * is_new.int(), accumulate=True)
    counts.counts[slots, -1] += is_new.int()
    return counts.counts[slots, :-1]


def _rows(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().squeeze(1)


def _at(params: SamplingTensors, at: torch.Tensor) -> SamplingTensors:
    return SamplingTensors(*(values[at] for values in params))


def _gumbel(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """Gumbel noise [rows, vocab_size] by a counter-based hash: it does not depend on the other rows of the batch."""
    token_ids = torch.arange(vocab_size, device=params.key_low.device)
    words = _mix32(token_ids ^ params.key_low.unsqueeze(1))
    words = _mix32((words + params.key_high.unsqueeze(1)) & _WORD)
    uniform = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(words: torch.Tensor) -> torch.Tensor:
    """Xor-shifts and odd multiplications of 32-bit words in int64 lanes: products may wrap, the low bits stay true."""
    words = (words >> 16).bitwise_xor_(words).mul_(0x7FEB352D).bitwise_and_(_WORD)
    words = (words >> 15).bitwise_xor_(words).mul_(0x846CA68B).bitwise_and_(_WORD)
    return (words >> 16).bitwise_xor_(words)
