"""A launch's tokens and log-probabilities on their way to the host: one int32 tensor, so that one copy brings them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.backend import Backend
from kernels.top_logprobs import top_logprobs
from worker_service.core.batch import SampledRow
from worker_service.core.runner_port import LaunchTokens
from worker_service.core.sampling_params import TokenLogprobs


def joined(tokens: torch.Tensor, logits: torch.Tensor, num_logprobs: int, backend: Backend) -> torch.Tensor:
    """Returns the tokens int32, and floats by their bits: their logprobs and those of the num_logprobs best, if >= 0.

    Log-probabilities are the model's own: before penalties, temperature and filters.
    """
    if num_logprobs < 0:
        return tokens
    best = top_logprobs(logits, tokens, min(num_logprobs, logits.shape[1]), backend=backend)
    values = (best.logprobs.view(torch.int32), best.top_tokens.flatten(), best.top_logprobs.view(torch.int32).flatten())
    return torch.cat((tokens, *values))


def unjoined(values: torch.Tensor, sampled: Sequence[SampledRow], num_logprobs: int) -> LaunchTokens:
    rows = len(sampled)
    token_ids = tuple(values[:rows].tolist())
    if num_logprobs < 0:
        return LaunchTokens(token_ids, (None,) * rows)
    chosen = values[rows : 2 * rows].view(torch.float32).tolist()
    tops = values[2 * rows :].view(2, rows, -1) if num_logprobs else values.new_empty(2, rows, 0)
    top_ids, top_logprobs = tops[0].tolist(), tops[1].view(torch.float32).tolist()
    logprobs = tuple(
        _row_logprobs(entry.sampling.logprobs, *row)
        for entry, *row in zip(sampled, chosen, top_ids, top_logprobs, strict=True)
    )
    return LaunchTokens(token_ids, logprobs)


def _row_logprobs(wanted: int | None, sampled: float, ids: list[int], values: list[float]) -> TokenLogprobs | None:
    if wanted is None:
        return None
    return TokenLogprobs(sampled, tuple(zip(ids[:wanted], values[:wanted], strict=True)))
