"""Explanations and statistics of one worker, for people. Reads only; knows no transport."""

from __future__ import annotations

from cache_service.core.device_cache import DeviceCache
from cache_service.core.stats import GroupStats, WorkerStats
from cache_service.core.survey import Survey, survey
from cache_service.core.types import Explanation, MissReason, Namespace, Residence, Segment
from cache_service.core.worker import Worker

_SENTENCES = {
    MissReason.NEVER_SEEN: "No request with these tokens has been published here.",
    MissReason.EVICTED: "These tokens were cached, and evicted since.",
    MissReason.PAGE_TAIL: "Only whole pages are reused, and the last token is always computed.",
    MissReason.NO_SNAPSHOT: "The KV is cached, but group {group} has no snapshot at a later boundary.",
    MissReason.WINDOW_GONE: "The KV is cached, but the window of group {group} before a later boundary is gone.",
    MissReason.OTHER_SALT: "The tokens are cached under another salt.",
}


def explain(worker: Worker, namespace: Namespace, tokens: bytes) -> Explanation:
    """Where each part of the prompt is, and why the rest is missing."""
    cache = worker.cache
    found = survey(cache.tree, cache.layout, namespace, tokens, cache.host)
    match = found.match(cache.layout.page_tokens)
    if _cached_under_other_salt(cache, found, namespace, tokens):
        match = match._replace(miss_reason=MissReason.OTHER_SALT)
    size, num_tokens = cache.layout.page_tokens, len(tokens) // 4
    segments = []
    if found.usable:
        segments.append(Segment(0, found.usable * size, Residence.DEVICE))
    if found.host > found.usable:
        segments.append(Segment(found.usable * size, (found.host - found.usable) * size, Residence.HOST))
    rest = found.host * size
    segments.append(Segment(rest, num_tokens - rest, Residence.MISSING, match.miss_reason))
    notes = [_SENTENCES[match.miss_reason].format(group=match.limiting_group)]
    if cache.host is not None and cache.host.index.breaker.is_open:
        notes.append("The host tier is not asked: its breaker is open.")
    return Explanation(worker.hello.worker_id, worker.hello.endpoint, match, tuple(segments), tuple(notes))


def _cached_under_other_salt(cache: DeviceCache, found: Survey, namespace: Namespace, tokens: bytes) -> bool:
    if found.reason is not MissReason.NEVER_SEEN:
        return False
    for other in cache.tree.roots:
        if other.salt != namespace.salt and other._replace(salt=namespace.salt) == namespace:
            there = survey(cache.tree, cache.layout, other, tokens, None)
            if there.matched > found.matched:
                return True
    return False


def worker_stats(worker: Worker) -> WorkerStats:
    cache, counters = worker.cache, worker.cache.counters
    return WorkerStats(
        worker_id=worker.hello.worker_id,
        endpoint=worker.hello.endpoint,
        incarnation=worker.hello.incarnation,
        model=worker.model,
        connected=worker.connected,
        groups=tuple(_group_stats(cache, group) for group in range(len(cache.layout.specs))),
        num_leases=len(cache.leases),
        num_tickets=len(cache.transfers),
        num_requests=counters.requests,
        prompt_tokens=counters.prompt,
        cached_tokens=counters.cached,
        fetched_tokens=counters.fetched,
        computed_tokens=counters.computed,
        num_refusals=counters.refusals,
        num_nodes=cache.tree.num_nodes,
        num_ghost_pages=cache.tree.ghost_pages,
        misses=tuple(sorted(counters.misses.items())),
    )


def _group_stats(cache: DeviceCache, group: int) -> GroupStats:
    spec = cache.layout.specs[group]
    if group in cache.sparse:
        pages = cache.sparse[group]
        free, evictable, evicted = pages.pool.num_free, pages.num_evictable, pages.num_evicted
    else:
        free, evictable, evicted = (
            cache.pools[group].num_free,
            cache.tree.evictable_pages,
            cache.counters.evicted,
        )
    return GroupStats(spec.name, spec.kind, spec.num_pages, free, evictable, evicted)
