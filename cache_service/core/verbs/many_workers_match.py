"""Matches one prompt on many workers: hashed once, and workers that hold nothing of it share one match."""

from __future__ import annotations

from cache_service.core.base.page_hash import PromptHashes
from cache_service.core.device.ghost_table import mark_of
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs.fetch_policy import why_not_fetched
from cache_service.core.verbs.prefix_match import PrefixMatch, match_prefix, resident
from session.words import Match, MissReason, Namespace


class PromptMatch:
    """Valid as long as nothing changes between the workers that are asked."""

    def __init__(self, namespace: Namespace, tokens: bytes) -> None:
        self._namespace, self._tokens = namespace, tokens
        self._hashes: dict[int, PromptHashes] = {}  # by bytes of a page's tokens
        self._first_pages: dict[int, bytes] = {}  # likewise
        self._cold: dict[object, tuple[PrefixMatch, Match]] = {}
        self._warm: dict[tuple[int, MissReason, int], Match] = {}

    def prefix(self, cache: DeviceCache) -> PrefixMatch:
        hashes = self.hashes(cache) if cache.host is not None else None
        return match_prefix(cache, self._namespace, self._tokens, cache.host, hashes)

    def match(self, cache: DeviceCache) -> Match:
        """Returns the worker's match; workers that neither hold the first page nor evicted it lately share one."""
        layout, root = cache.layout, cache.tree.roots.get(self._namespace)
        first_page = self._first_pages.get(layout.page_key_bytes)
        if first_page is None:
            first_page = self._first_pages[layout.page_key_bytes] = self._tokens[: layout.page_key_bytes]
        if (root is not None and first_page in root.children) or self._was_evicted(cache, first_page):
            if root is None or not layout.resumes_anywhere or cache.host is not None:
                found = self.prefix(cache)
                return _told(cache, found, found.match(layout.page_tokens))
            return self._on_device(*resident(cache.tree, layout, self._tokens, root), layout.page_tokens)
        # Layouts are shared by the workers that declare the same groups, so their identity tells them apart.
        key = (id(cache.layout), cache.host)
        cold = self._cold.get(key)
        if cold is None:
            found = self.prefix(cache)
            cold = self._cold[key] = found, found.match(cache.layout.page_tokens)
        return _told(cache, *cold)

    def _on_device(self, num_pages: int, reason: MissReason, page_tokens: int) -> Match:
        """Returns the match where no group has holes: what is resident can be used. Workers that hold as much share
        it."""
        found = self._warm.get((num_pages, reason, page_tokens))
        if found is None:
            tokens = num_pages * page_tokens
            found = self._warm[num_pages, reason, page_tokens] = Match(tokens, tokens, 0, "", reason)
        return found

    def _was_evicted(self, cache: DeviceCache, first_page: bytes) -> bool:
        ghosts = cache.tree.ghosts
        return ghosts.num_pages > 0 and ghosts.find(mark_of(self.hashes(cache).digest, 0, first_page)) is not None

    def hashes(self, cache: DeviceCache) -> PromptHashes:
        size = cache.layout.page_key_bytes
        if size not in self._hashes:
            self._hashes[size] = PromptHashes(self._namespace, self._tokens, size)
        return self._hashes[size]


def _told(cache: DeviceCache, found: PrefixMatch, match: Match) -> Match:
    """Returns the match, with the reason where this worker would compute what the host tier has."""
    declined = why_not_fetched(cache, found) if match.host_tokens else None
    return match if declined is None else match._replace(miss_reason=declined)
