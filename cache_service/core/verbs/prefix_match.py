"""Read-only: how far a prompt is cached on one worker and in its host tier, and where it can resume.

Why not later is decided in miss_reasons.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.core.base.page_hash import PromptHashes
from cache_service.core.device.radix_node import Root
from cache_service.core.device.radix_tree import RadixTree, Walk
from cache_service.core.device_cache import DeviceCache
from cache_service.core.host.hash_index import HostView
from cache_service.core.kinds.group import Group, limiting_group, residency, resume
from cache_service.core.kinds.layout import Layout
from cache_service.core.verbs.miss_reasons import miss_reason
from session.words import HASH_BYTES, PAGE_ID_BYTES, Match, MissReason, Namespace

# Pages that are hashed before the tier is asked for them: 1, 2, 4 and so on up to this.
_MOST_AT_ONCE = 512


@dataclass(slots=True)
class PrefixMatch:
    """Boundaries in pages. `sparse_ids` are the path's page ids by the numbers of the groups with holes.

    0 ........ usable_pages ........ matched_pages ........ host_pages
    """

    walk: Walk
    limit_pages: int
    matched_pages: int
    usable_pages: int
    host_pages: int  # the boundary that a fetch would reach; `usable_pages` without one
    reason: MissReason
    sparse_ids: dict[int, bytes]
    limiting: str = ""
    hashes: PromptHashes | None = None  # up to the page before `host_pages`; None where no host copy was found

    def match(self, page_tokens: int) -> Match:
        usable = self.usable_pages
        return Match(
            self.matched_pages * page_tokens,
            usable * page_tokens,
            (self.host_pages - usable) * page_tokens,
            self.limiting,
            self.reason,
        )


def match_prefix(
    cache: DeviceCache,
    namespace: Namespace,
    tokens: bytes,
    host: HostView | None,
    hashes: PromptHashes | None = None,
) -> PrefixMatch:
    """Returns the match: one walk, then the largest boundary at which every group can resume.

    `hashes` are the prompt's, where several workers are asked about it.
    """
    tree, layout = cache.tree, cache.layout
    limit = (len(tokens) - 1) // layout.page_key_bytes
    root = tree.roots.get(namespace)
    if root is None:
        root = Root(namespace, len(layout.specs))  # a root that is not in the tree
    walk = tree.walk(root, tokens, 0, limit * layout.page_key_bytes)
    matched = walk.end
    found = PrefixMatch(walk, limit, matched, matched, matched, MissReason.PAGE_TAIL, {})
    limiting = None if layout.resumes_anywhere else _resume_on_device(found, cache)
    found.reason = miss_reason(tree, root, tokens, matched, limit, limiting)
    if host is not None and found.usable_pages < limit:
        _look_in_host(found, cache, host, hashes or PromptHashes(namespace, tokens, layout.page_key_bytes))
    return found


def _resume_on_device(found: PrefixMatch, cache: DeviceCache) -> Group | None:
    """Finds the boundary at which every group can resume. Returns the group that cannot at the matched tokens' end."""
    for group in cache.sparse:
        found.sparse_ids[group.number] = page_ids(cache.tree, found.walk, group.number)
    flags = [residency(found.sparse_ids[group.number]) for group in cache.sparse]
    found.usable_pages = found.host_pages = resume(cache.sparse, flags, found.matched_pages)
    limiting = limiting_group(cache.sparse, flags, found.matched_pages)
    if limiting is not None:
        found.limiting = limiting.spec.name
    return limiting


def page_ids(tree: RadixTree, walk: Walk, group: int) -> bytes:
    """Returns a group's page ids of what a walk passed, with holes."""
    parts: list[bytes | bytearray] = [node.pages[group] for node in tree.path(walk.node)]
    if walk.child is not None:
        parts.append(walk.child.pages[group][: walk.pages * PAGE_ID_BYTES])
    return b"".join(parts)


def resident(tree: RadixTree, layout: Layout, tokens: bytes, root: Root) -> tuple[int, MissReason]:
    """Returns how many leading pages of the prompt the device holds, and why not more."""
    limit = (len(tokens) - 1) // layout.page_key_bytes
    walk = tree.walk(root, tokens, 0, limit * layout.page_key_bytes)
    return walk.end, miss_reason(tree, root, tokens, walk.end, limit)


def _look_in_host(found: PrefixMatch, cache: DeviceCache, host: HostView, hashes: PromptHashes) -> None:
    """Looks in the host tier behind the matched pages, up to the first absent page: a long miss costs one hash."""
    if not any(group.reach_pages() for group in cache.groups):
        return  # windows of one token read no page before a boundary: there is nothing to bring
    _seed(found, cache.tree, hashes)
    end = _reach(found, cache.layout, host, hashes)
    if end == found.usable_pages:
        return
    found.hashes = hashes
    # A boundary beyond `usable_pages` needs no page before this one of a group with holes.
    first = max(0, found.usable_pages - max((group.reach_pages() for group in cache.sparse), default=0))
    flags = [_with_host(found, group.number, first, end, host) for group in cache.sparse]
    found.host_pages = max(resume(cache.sparse, flags, end), found.usable_pages)


def _seed(found: PrefixMatch, tree: RadixTree, hashes: PromptHashes) -> None:
    """Takes hashes of the matched pages that the tree has computed before."""
    if hashes.num_pages >= found.matched_pages:
        return
    walk = found.walk
    partly = walk.child if walk.pages else None
    tree.ensure_hashes(walk.node if partly is None else partly)
    parts: list[bytes | bytearray] = [node.hashes for node in tree.path(walk.node)]
    if partly is not None:
        parts.append(partly.hashes[: walk.pages * HASH_BYTES])
    hashes.seed(b"".join(parts))


def _reach(found: PrefixMatch, layout: Layout, host: HostView, hashes: PromptHashes) -> int:
    """Returns the first page number behind the matched ones that the tier does not hold whole.

    What was found for one worker holds for the next: 64 workers would look up the same 8,192 pages each.
    """
    runs = hashes.reach.setdefault((host.index, host.fingerprint, layout.full_mask), [])
    for first, end in runs:
        if first <= found.matched_pages <= end:
            return end
    page, count = found.matched_pages, 1
    while page < found.limit_pages:
        stop = min(page + count, found.limit_pages)
        held = host.index.leading(
            host.fingerprint, hashes.run(page, stop), layout.full_mask, host.index.cleared.floor(hashes.digest)
        )
        page += held
        if page < stop:
            break
        count = min(2 * count, _MOST_AT_ONCE)
    runs.append((found.matched_pages, page))
    return page


def _with_host(found: PrefixMatch, group: int, first: int, end: int, host: HostView) -> bytes:
    """Returns the residency of a group up to `end`, with the host's pages from page number `first` on."""
    flags = bytearray(residency(found.sparse_ids[group]))
    flags += bytes(end - len(flags))
    assert found.hashes is not None
    floor = host.index.cleared.floor(found.hashes.digest)
    for page, page_hash in enumerate(found.hashes.run(first, end), first):
        if not flags[page] and host.index.stored(host.fingerprint, page_hash, floor) >> group & 1:
            flags[page] = 1
    return bytes(flags)
