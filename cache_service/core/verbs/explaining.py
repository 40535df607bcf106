"""Explain: where each part of a prompt is on one worker, and why the rest is missing. Reads only."""

from __future__ import annotations

from collections.abc import Generator
from itertools import takewhile

from cache_service.core.base.types import Explanation, Residence, Segment
from cache_service.core.device_cache import DeviceCache
from cache_service.core.kinds.group import residency
from cache_service.core.verbs.ages import UsedPart, gone_age, used_parts
from cache_service.core.verbs.fetch_policy import estimate_fetch, why_not_fetched
from cache_service.core.verbs.holders import find_holders
from cache_service.core.verbs.many_workers_match import PromptMatch
from cache_service.core.verbs.prefix_match import PrefixMatch
from cache_service.core.worker import Worker
from session.words import TOKEN_BYTES, MissReason, Namespace

# Namespaces that Explain looks at between two yields: about 1 ms.
ROOTS_IN_A_SLICE = 2_000
# Snapshots that Explain names of each group.
MAX_NAMED = 8

_SENTENCES = {
    MissReason.NEVER_SEEN: "No request with these tokens has been published here.",
    MissReason.EVICTED: "These tokens were cached, and evicted since.",
    MissReason.PAGE_TAIL: "Only whole pages are reused, and the last token is always computed.",
    MissReason.NO_SNAPSHOT: "The KV is cached, but group {group} has no snapshot at a later boundary.",
    MissReason.WINDOW_GONE: "The KV is cached, but the window of group {group} before a later boundary is gone.",
    MissReason.OTHER_SALT: "The tokens are cached under another salt.",
    MissReason.CLEARED: "These tokens were cached, and dropped by a Clear call since.",
    MissReason.BYPASSED: "The request bypassed the cache.",
}
_BUSY = "The host tier has {tokens} more tokens; as many fetches as may be are under way."
_UNASKED = "The host tier has {tokens} more tokens, and is not asked for them."
_SLOWER = (
    "The host tier has {tokens} more tokens, which are computed and not fetched: by the worker's measured rates their "
    "{mib:.1f} MiB take {fetch_s:.3f} s, and computing them takes {compute_s:.3f} s."
)


def explain(
    worker: Worker, namespace: Namespace, tokens: bytes, prompt: PromptMatch, now_ms: int
) -> Generator[None, None, Explanation]:
    """Returns where each part of the prompt is, and why the rest is missing; yields between slices of the work."""
    cache = worker.cache
    found = prompt.prefix(cache)
    pinned, left_ms = _pinned(cache, found, now_ms)
    held = find_holders(cache, found)
    match = found.match(cache.layout.page_tokens)
    segments = _segments(found, used_parts(cache, found, now_ms), cache.layout.page_tokens, len(tokens) // TOKEN_BYTES)
    reason, gone = found.reason, gone_age(cache, found, tokens, now_ms)
    if found.host_pages == found.limit_pages:  # the host tier has what the device lacks
        reason, gone = MissReason.PAGE_TAIL, None
    yield
    if reason is MissReason.NEVER_SEEN and (yield from _is_under_other_salt(cache, found, namespace, tokens)):
        reason = MissReason.OTHER_SALT
        match = match._replace(miss_reason=reason)
    segments[-1] = segments[-1]._replace(miss_reason=reason, gone=gone)
    notes = [_SENTENCES[reason].format(group=match.limiting_group)]
    notes += _snapshot_notes(cache, found)
    declined = why_not_fetched(cache, found) if match.host_tokens else None
    if declined is not None:
        match = match._replace(miss_reason=declined)
        notes.append(_declined_note(cache, found, declined))
    notes += _pause_notes(cache, now_ms)
    hello = worker.hello
    return Explanation(hello.worker_id, hello.endpoint, match, tuple(segments), tuple(notes), pinned, left_ms, *held)


def _declined_note(cache: DeviceCache, found: PrefixMatch, declined: MissReason) -> str:
    """Returns why a request would compute what the host tier has."""
    tokens = (found.host_pages - found.usable_pages) * cache.layout.page_tokens
    if declined is MissReason.BREAKER_OPEN:
        return _UNASKED.format(tokens=tokens)
    estimate = estimate_fetch(cache, found)
    if declined is MissReason.FETCH_BUSY or estimate is None:
        return _BUSY.format(tokens=tokens)
    mib = estimate.num_bytes / (1 << 20)
    return _SLOWER.format(tokens=tokens, mib=mib, fetch_s=estimate.fetch_s, compute_s=estimate.compute_s)


def _pause_notes(cache: DeviceCache, now_ms: int) -> list[str]:
    """Returns whose fetches are paused, why, and for how long, where this worker's are."""
    own, host = cache.fetch_breaker, cache.host
    if host is None:
        return []
    notes = []
    if host.index.breaker.open_until_ms is not None:
        left_s = max(host.index.breaker.open_until_ms - now_ms, 0) / 1000
        notes.append(f"Fetches of all workers are paused for {left_s:.1f} s: the store fails.")
    if own.open_until_ms is not None:
        left_s = max(own.open_until_ms - now_ms, 0) / 1000
        notes.append(f"Fetches of {cache.worker_id} are paused for {left_s:.1f} s: its last {own.failures} failed.")
    elif own.is_trying:
        notes.append(f"Fetches of {cache.worker_id} failed; one at a time is tried until one is answered.")
    return notes


def _snapshot_notes(cache: DeviceCache, found: PrefixMatch) -> list[str]:
    """Returns a note for each group of snapshots: how many lie in the matched prefix, and where the last ones are."""
    notes = []
    for group in cache.sparse:
        if group.has_table or not found.matched_pages:
            continue
        flags = residency(found.sparse_ids[group.number])
        ends = [(page + 1) * group.page_tokens for page, held in enumerate(flags) if held]
        named = ", ".join(map(str, ends[-MAX_NAMED:])) or "none"
        notes.append(f"Snapshots of group {group.spec.name} in the matched tokens: {len(ends)}; the last at {named}.")
    return notes


def _segments(found: PrefixMatch, parts: list[UsedPart], page_tokens: int, num_tokens: int) -> list[Segment]:
    segments = []
    start = 0
    for end, age in parts:
        segments.append(Segment(start * page_tokens, (end - start) * page_tokens, Residence.DEVICE, last_used=age))
        start = end
    if found.host_pages > found.usable_pages:
        segments.append(
            Segment(
                found.usable_pages * page_tokens, (found.host_pages - found.usable_pages) * page_tokens, Residence.HOST
            )
        )
    rest = found.host_pages * page_tokens
    return [*segments, Segment(rest, num_tokens - rest, Residence.MISSING)]


def _pinned(cache: DeviceCache, found: PrefixMatch, now_ms: int) -> tuple[int, int]:
    """Returns how many leading tokens are under a Pin call, and for how many ms more all of them are."""
    walk = found.walk
    path = [*cache.tree.path(walk.node), *([walk.child] if walk.child is not None and walk.pages else [])]
    pinned = list(takewhile(lambda node: node.soft_until_ms, path))
    if not pinned:
        return 0, 0
    end = min(pinned[-1].end, walk.end)
    return end * cache.layout.page_tokens, max(min(node.soft_until_ms for node in pinned) - now_ms, 0)


def _is_under_other_salt(
    cache: DeviceCache, found: PrefixMatch, namespace: Namespace, tokens: bytes
) -> Generator[None, None, bool]:
    first = tokens[: cache.layout.page_key_bytes]
    for number, (other, root) in enumerate(list(cache.tree.roots.items())):
        if number % ROOTS_IN_A_SLICE == ROOTS_IN_A_SLICE - 1:
            yield
        if first not in root.children or (other.model, other.adapter) != (namespace.model, namespace.adapter):
            continue
        if (
            other.salt != namespace.salt
            and cache.tree.walk(root, tokens, 0, len(first) * found.limit_pages).end > found.matched_pages
        ):
            return True
    return False
