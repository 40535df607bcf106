"""Sampling parameters of one request, which values are valid, and the logprobs that they may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from worker_service.core.errors import InvalidField

MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1024
MAX_LOGPROBS = 64
# What fits into an int32 and into an fp32 number: a launch carries the values of all its rows in arrays of these.
MAX_INT32 = (1 << 31) - 1
MAX_FP32 = 3.4028234663852886e38
# Beyond these a penalised score overflows fp32, or underflows to 0, for any logits.
MIN_PENALTY, MAX_PENALTY = 1e-3, 1e3
MAX_ADDED_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions. Randomness is a function of the seed and the position only.

    The repetition penalty concerns tokens of the prompt and of the answer, the other two those of the answer alone.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_token_text: bool = False

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        """Returns whether the token is the best one of the model's own scores."""
        return self.temperature == 0.0 and not self.has_penalties

    def validate(self) -> None:
        """Raises InvalidField for the first value out of its range. NaN fails every comparison, so it fails here.

        What passes can be put into the arrays of a launch: a launch is shared, so no row may make it fail.
        """
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("temperature", 0.0 <= self.temperature <= MAX_FP32, "a finite number, 0 or more")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._require("top_k", 0 <= self.top_k <= MAX_INT32, f"between 0 (off) and {MAX_INT32}")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        self._require(
            "repetition_penalty",
            MIN_PENALTY <= self.repetition_penalty <= MAX_PENALTY,
            f"between {MIN_PENALTY:g} and {MAX_PENALTY:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            fits = -MAX_ADDED_PENALTY <= getattr(self, name) <= MAX_ADDED_PENALTY
            self._require(name, fits, f"between {-MAX_ADDED_PENALTY:g} and {MAX_ADDED_PENALTY:g}")
        self._require("seed", 0 <= self.seed < 1 << 64, "an unsigned 64-bit number")
        self._require("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        self._require("stop", all(self.stop), "without empty strings")
        few = len(self.stop_token_ids) <= MAX_STOP_TOKENS
        self._require("stop_token_ids", few, f"at most {MAX_STOP_TOKENS} token ids")
        self._require("stop_token_ids", all(0 <= token <= MAX_INT32 for token in self.stop_token_ids), "token ids")
        self._require("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")

    def _require(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise InvalidField(field, f"must be {wanted}, not {getattr(self, field)!r}")


class TokenLogprobs(NamedTuple):
    """Natural logs of the model's own probabilities: of the sampled token, and of the likeliest ones, best first."""

    sampled: float
    top: tuple[tuple[int, float], ...]
