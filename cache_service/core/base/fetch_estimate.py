"""Whether bringing pages from the host tier takes less time than computing their tokens, by measured rates."""

from __future__ import annotations

from typing import NamedTuple

# A rate of which nothing new was heard for this long counts as twice what it was, and so on: one slow moment of the
# store would otherwise end all fetches for good, since what is not fetched is not measured.
DOUBLING_MS = 60_000
_MOST_DOUBLINGS = 40


class FetchRates(NamedTuple):
    """Measured rates; 0: not known. The bytes are those of one rank."""

    compute_tokens_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0


class FetchEstimate(NamedTuple):
    """What a fetch of all that the host tier has would move, and how long that and computing the same tokens take."""

    num_tokens: int
    num_bytes: int
    fetch_s: float
    compute_s: float

    @property
    def pays(self) -> bool:
        return self.fetch_s < self.compute_s


def estimate(num_tokens: int, num_bytes: int, rates: FetchRates, idle_ms: int) -> FetchEstimate | None:
    """Returns None while a rate is not known. `idle_ms`: since the last fetch that was measured."""
    if rates.compute_tokens_per_s <= 0 or rates.fetch_bytes_per_s <= 0:
        return None
    bytes_per_s = rates.fetch_bytes_per_s * 2.0 ** min(max(idle_ms, 0) // DOUBLING_MS, _MOST_DOUBLINGS)
    return FetchEstimate(num_tokens, num_bytes, num_bytes / bytes_per_s, num_tokens / rates.compute_tokens_per_s)
