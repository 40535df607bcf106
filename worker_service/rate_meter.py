"""The rates that a worker reports to the cache service: how fast it computes prompts, and how fast it moves pages."""

from __future__ import annotations

from session.messages import Ack, Rates

# A launch says something about prefill only when prompts are most of it.
MIN_PREFILL_TOKENS = 32
_WEIGHT = 0.2


class RateMeter:
    """Moving averages; zero until something was measured."""

    def __init__(self) -> None:
        self._prefill_tokens_per_s = 0.0
        self._fetch_bytes_per_s = 0.0
        self._spill_bytes_per_s = 0.0

    def launched(self, prefill_tokens: int, all_tokens: int, seconds: float) -> None:
        if prefill_tokens >= max(MIN_PREFILL_TOKENS, all_tokens // 2) and seconds > 0:
            self._prefill_tokens_per_s = _moved(self._prefill_tokens_per_s, all_tokens / seconds)

    def fetched(self, ack: Ack) -> None:
        if ack.num_bytes and ack.seconds > 0:
            self._fetch_bytes_per_s = _moved(self._fetch_bytes_per_s, ack.num_bytes / ack.seconds)

    def spilled(self, ack: Ack) -> None:
        if ack.num_bytes and ack.seconds > 0:
            self._spill_bytes_per_s = _moved(self._spill_bytes_per_s, ack.num_bytes / ack.seconds)

    def rates(self) -> Rates:
        return Rates(self._prefill_tokens_per_s, self._fetch_bytes_per_s, self._spill_bytes_per_s)


def _moved(average: float, value: float) -> float:
    return value if average == 0.0 else average + _WEIGHT * (value - average)
