"""The sampling parameters of a batch as flat arrays, made on the host for one copy to the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from worker_service.core.batch import SampledRow
from worker_service.model.sampler import Flags, row_key

# Below it the best token's probability rounds to 1 anyway, and dividing by it could overflow.
LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """`arrays` in the order of the fields of sampler.SamplingTensors."""

    arrays: tuple[array[int] | array[float], ...]
    flags: Flags


def sampling_arrays(sampled: Seq[SampledRow]) -> SamplingArrays:
    params = [row.sampling for row in sampled]
    temperatures = array("f", (p.temperature if p.temperature >= LEAST_TEMPERATURE else 0.0 for p in params))
    keys = [row_key(row.sampling.seed, row.position) if row.sampling.temperature else (0, 0) for row in sampled]
    history_rows, history_tokens = _histories(sampled)
    return SamplingArrays(
        arrays=(
            temperatures,
            array("i", (p.top_k for p in params)),
            array("f", (p.top_p for p in params)),
            array("f", (p.min_p for p in params)),
            array("f", (p.repetition_penalty for p in params)),
            array("q", (low for low, _ in keys)),
            array("q", (high for _, high in keys)),
            history_rows,
            history_tokens,
        ),
        flags=Flags(
            any_random=any(temperatures),
            any_filter=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params),
            any_penalty=len(history_rows) > 0,
            num_logprobs=max((-1 if p.logprobs is None else p.logprobs for p in params), default=-1),
        ),
    )


def _histories(sampled: Seq[SampledRow]) -> tuple[array[int], array[int]]:
    rows, tokens = array("q"), array("i")
    for index, row in enumerate(sampled):
        if row.history is not None and row.sampling.repetition_penalty != 1.0:
            rows.extend(array("q", (index,)) * len(row.history))
            tokens.extend(row.history)
    return rows, tokens
