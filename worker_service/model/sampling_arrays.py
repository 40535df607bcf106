"""The sampling parameters of a batch as flat arrays, made on the host for one copy to the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from functools import cache, lru_cache

from kernels.sample_tokens import SamplingTensors
from worker_service.core.batch import SampledRow
from worker_service.core.sequence import NO_PENALTY_SLOT
from worker_service.model.staging import HostArray

# Below it the best token's probability rounds to 1 anyway, and dividing by it could overflow.
LEAST_TEMPERATURE = 1e-4
NUM_ARRAYS = len(SamplingTensors._fields)

_WORD = 0xFFFFFFFF
_LONG_WORD = 0xFFFFFFFFFFFFFFFF
# 2^64 over the golden ratio: keeps small seeds and positions away from 0, which the mixers leave as it is.
_ODD = 0x9E3779B97F4A7C15


def most_logprobs(sampled: Seq[SampledRow]) -> int:
    """Returns the most that any row asks for: -1 = no row asks, 0 = only the sampled token's."""
    return max([-1 if row.sampling.logprobs is None else row.sampling.logprobs for row in sampled], default=-1)


def sampling_arrays(sampled: Seq[SampledRow]) -> tuple[HostArray, ...]:
    """Returns arrays in the order of the fields of SamplingTensors."""
    if all(row.sampling.is_greedy for row in sampled):
        return greedy_arrays(len(sampled))
    params = [row.sampling for row in sampled]
    keys = [row_key(p.seed, row.position) if p.temperature else (0, 0) for row, p in zip(sampled, params, strict=True)]
    slots = [NO_PENALTY_SLOT if row.counted is None else row.counted.slot for row in sampled]
    return (
        array("f", [p.temperature if p.temperature >= LEAST_TEMPERATURE else 0.0 for p in params]),
        array("i", [p.top_k for p in params]),
        array("f", [p.top_p for p in params]),
        array("f", [p.min_p for p in params]),
        array("f", [p.repetition_penalty for p in params]),
        array("f", [p.presence_penalty for p in params]),
        array("f", [p.frequency_penalty for p in params]),
        array("q", [low for low, _ in keys]),
        array("q", [high for _, high in keys]),
        array("i", slots),
    )


@cache
def greedy_arrays(size: int) -> tuple[HostArray, ...]:
    """Returns most launches' arrays, made once for each number of rows, and never written to."""
    off = {"top_k": ("i", 0), "top_p": ("f", 1.0), "repetition": ("f", 1.0), "slots": ("i", NO_PENALTY_SLOT)}
    off |= {"key_low": ("q", 0), "key_high": ("q", 0)}
    kinds = [off.get(name, ("f", 0.0)) for name in SamplingTensors._fields]
    return tuple(array(kind, [value]) * size for kind, value in kinds)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words hashed from (seed, position): flipping any input bit flips about half of theirs."""
    mixed = _mix64(_mixed_seed(seed) + (position + 1) * _ODD & _LONG_WORD)
    return mixed & _WORD, mixed >> 32


@lru_cache(maxsize=4096)  # a sequence's seed comes again with each of its tokens
def _mixed_seed(seed: int) -> int:
    return _mix64(seed + _ODD & _LONG_WORD)


def _mix64(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _LONG_WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _LONG_WORD
    return word ^ (word >> 31)
