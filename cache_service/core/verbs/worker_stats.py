"""What Stats and metrics tell of one worker. Reads only."""

from __future__ import annotations

from cache_service.core.base.stats import WorkerStats
from cache_service.core.worker import Worker


def worker_stats(worker: Worker) -> WorkerStats:
    cache, counters = worker.cache, worker.cache.counters
    return WorkerStats(
        worker_id=worker.hello.worker_id,
        endpoint=worker.hello.endpoint,
        incarnation=worker.hello.incarnation,
        model=worker.hello.model,
        connected=worker.connected,
        groups=tuple(group.stats(cache.tree.evictable_pages, counters.evicted) for group in cache.groups),
        num_leases=len(cache.leases),
        num_tickets=len(cache.transfers),
        num_requests=counters.requests,
        prompt_tokens=counters.prompt,
        cached_tokens=counters.cached,
        fetched_tokens=counters.fetched,
        computed_tokens=counters.computed,
        num_refusals=counters.refusals,
        num_nodes=cache.tree.num_nodes,
        num_ghost_pages=cache.tree.ghosts.num_pages,
        kept_bytes=cache.kept.num_bytes,
        misses=tuple(sorted(counters.misses.items())),
        matched_tokens=counters.matched,
        pinned_tokens=cache.soft_pins.num_pages * cache.layout.page_tokens,
        restored_pages=counters.restored,
        restored_tokens=counters.restored * cache.layout.page_tokens,
        rates=cache.rates,
        declined_tokens=counters.declined,
        fetches_paused=cache.fetch_breaker.is_open,
    )
