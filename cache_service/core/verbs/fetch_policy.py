"""Whether to bring pages from the host tier or to compute their tokens, by the rates that the worker measured.

A fetch pays where its bytes take less time than the tokens that it saves; a snapshot counts with all its bytes. Reads
only.
"""

from __future__ import annotations

from cache_service.core.base.fetch_estimate import FetchEstimate, FetchRates, estimate
from cache_service.core.base.types import FetchPolicy
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs.prefix_match import PrefixMatch
from session.words import MissReason


def estimate_fetch(cache: DeviceCache, found: PrefixMatch) -> FetchEstimate | None:
    """Returns what is known of a fetch up to `found.host_pages`; None while a rate is unknown.

    Before the first fetch the rate of spills stands for that of fetches.
    """
    rates = cache.rates
    num_tokens = (found.host_pages - found.usable_pages) * cache.layout.page_tokens
    num_bytes = sum(group.fetch_bytes(found.matched_pages, found.host_pages) for group in cache.groups)
    measured = FetchRates(rates.prefill_tokens_per_s, rates.fetch_bytes_per_s or rates.spill_bytes_per_s)
    return estimate(num_tokens, num_bytes, measured, cache.now_ms - cache.transfers.fetched_ms)


def is_trial(cache: DeviceCache) -> bool:
    """Returns whether a fetch would try the worker's way to the store, after a pause: one ticket alone does."""
    return cache.fetch_breaker.is_trying


def is_paused(cache: DeviceCache) -> bool:
    """Returns whether the worker starts no fetch, since its last ones failed or the store does."""
    if cache.host is None:
        return False
    return cache.host.index.readers.is_paused(cache.worker_id) or (is_trial(cache) and cache.transfers.num_fetching > 0)


def why_not_fetched(cache: DeviceCache, found: PrefixMatch) -> MissReason | None:
    """Returns why nothing is fetched of what the host tier has beyond the usable pages; None where it is fetched."""
    if is_paused(cache):
        return MissReason.BREAKER_OPEN
    if cache.transfers.num_fetching >= cache.config.max_open_tickets:
        return MissReason.FETCH_BUSY
    if cache.config.fetch is FetchPolicy.ALWAYS:
        return None
    known = estimate_fetch(cache, found)
    return None if known is None or known.pays else MissReason.FETCH_SLOWER
