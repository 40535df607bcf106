"""Whether to bring pages from the host tier or to compute their tokens, by the rates that the worker measured.

A fetch pays where its bytes take less time than the tokens that it saves; a snapshot counts with all its bytes. Reads
only.
"""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.base.types import FetchPolicy
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs.prefix_match import PrefixMatch
from session.words import MissReason

# A rate of which nothing new was heard for this long counts as twice what it was, and so on: one slow moment of the
# store would otherwise end all fetches for good, since what is not fetched is not measured.
DOUBLING_MS = 60_000
_MOST_DOUBLINGS = 40


class FetchEstimate(NamedTuple):
    """What a fetch of all that the host tier has would move, and how long that and computing the same tokens take."""

    num_tokens: int
    num_bytes: int
    fetch_s: float
    compute_s: float

    @property
    def pays(self) -> bool:
        return self.fetch_s < self.compute_s


def estimate_fetch(cache: DeviceCache, found: PrefixMatch) -> FetchEstimate | None:
    """Returns what is known of a fetch up to `found.host_pages`; None while a rate is unknown.

    Before the first fetch the rate of spills stands for that of fetches.
    """
    rates = cache.rates
    bytes_per_s = rates.fetch_bytes_per_s or rates.spill_bytes_per_s
    if rates.prefill_tokens_per_s <= 0 or bytes_per_s <= 0:
        return None
    idle_ms = max(cache.now_ms - cache.transfers.fetched_ms, 0)
    bytes_per_s *= 2.0 ** min(idle_ms // DOUBLING_MS, _MOST_DOUBLINGS)
    num_tokens = (found.host_pages - found.usable_pages) * cache.layout.page_tokens
    num_bytes = sum(group.fetch_bytes(found.matched_pages, found.host_pages) for group in cache.groups)
    return FetchEstimate(num_tokens, num_bytes, num_bytes / bytes_per_s, num_tokens / rates.prefill_tokens_per_s)


def why_not_fetched(cache: DeviceCache, found: PrefixMatch) -> MissReason | None:
    """Returns why nothing is fetched of what the host tier has beyond the usable pages; None where it is fetched."""
    if cache.transfers.num_fetching >= cache.config.max_open_tickets:
        return MissReason.FETCH_BUSY
    if cache.config.fetch is FetchPolicy.ALWAYS:
        return None
    estimate = estimate_fetch(cache, found)
    return None if estimate is None or estimate.pays else MissReason.FETCH_SLOWER
