"""Read-only: how far a prompt is cached on one worker and in its host tier, where it can resume, and why not later.

Knows no pool and no need for pages; the plan does.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.core.hash_index import HostView
from cache_service.core.layout import Layout
from cache_service.core.page_hash import namespace_digest, page_hashes
from cache_service.core.radix_node import Node, Root
from cache_service.core.radix_tree import RadixTree, Walk
from cache_service.core.resume import limiting_group, residency, resume, window_pages
from cache_service.core.types import HASH_BYTES, PAGE_ID_BYTES, GroupKind, Match, MissReason, Namespace


@dataclass(slots=True)
class Survey:
    """Boundaries in pages. `sparse_ids` are the path's page ids of each WINDOW and STATE group, with holes.

    0 ........ usable ........ matched ........ host
    """

    walk: Walk
    limit: int
    matched: int
    usable: int
    sparse_ids: dict[int, bytes]
    limiting: str
    reason: MissReason
    host: int  # the boundary that a fetch would reach; `usable` without one
    first_hash: int = 0  # the page number of hashes[0]
    hashes: bytes = b""  # packed, up to the page before `host`

    def hash_of(self, page: int) -> bytes:
        at = (page - self.first_hash) * HASH_BYTES
        return self.hashes[at : at + HASH_BYTES]

    def match(self, page_tokens: int) -> Match:
        return Match(
            self.matched * page_tokens,
            self.usable * page_tokens,
            (self.host - self.usable) * page_tokens,
            self.limiting,
            self.reason,
        )


def survey(tree: RadixTree, layout: Layout, namespace: Namespace, tokens: bytes, host: HostView | None) -> Survey:
    """Walk once, then take the largest boundary at which every group can resume."""
    limit = (len(tokens) - 1) // layout.page_bytes
    root = tree.roots.get(namespace)
    if root is None:
        root = Root(namespace, len(layout.specs))  # a stand-in that hangs on no tree
    walk = tree.walk(root, tokens, 0, limit * layout.page_bytes)
    matched = walk.end
    found = Survey(walk, limit, matched, matched, {}, "", MissReason.NONE, matched)
    if layout.sparse:
        _resume_on_device(found, tree, layout)
    found.reason = _miss_reason(found, layout)
    found.host = found.usable
    if host is not None and found.usable < limit and not host.index.breaker.is_open:
        _look_in_host(found, layout, root, tokens, host)
    return found


def _resume_on_device(found: Survey, tree: RadixTree, layout: Layout) -> None:
    walk = found.walk
    path = tree.path(walk.node)
    for group in layout.sparse:
        parts = [node.pages[group] for node in path]
        if walk.child is not None:
            parts.append(walk.child.pages[group][: walk.pages * PAGE_ID_BYTES])
        found.sparse_ids[group] = b"".join(parts)
    specs = [layout.specs[group] for group in layout.sparse]
    flags = [residency(found.sparse_ids[group]) for group in layout.sparse]
    found.usable = resume(specs, layout.page_tokens, flags, found.matched)
    if found.usable < found.matched:
        spec = limiting_group(specs, layout.page_tokens, flags, found.matched)
        found.limiting = spec.name if spec is not None else ""


def _miss_reason(found: Survey, layout: Layout) -> MissReason:
    if found.usable == found.limit:
        return MissReason.PAGE_TAIL
    if found.usable < found.matched:
        limiting = next(spec for spec in layout.specs if spec.name == found.limiting)
        return MissReason.WINDOW_GONE if limiting.kind == GroupKind.WINDOW else MissReason.NO_SNAPSHOT
    return MissReason.EVICTED if found.walk.ghost else MissReason.NEVER_SEEN


def _look_in_host(found: Survey, layout: Layout, root: Root, tokens: bytes, host: HostView) -> None:
    """Goes on from the matched node's hash and stops at the first absent page, so a long miss costs one hash."""
    first = _first_page_of_interest(found, layout)
    hashes = bytearray(_path_hashes(found.walk, first)) if first < found.matched else bytearray()
    parent = bytes(hashes[-HASH_BYTES:]) if hashes else _last_hash(found.walk)
    end, size, digest = found.matched, layout.page_bytes, namespace_digest(root.namespace)
    while end < found.limit:
        parent = page_hashes(digest, parent, tokens[end * size : (end + 1) * size], size)
        groups = host.index.groups(host.fingerprint, parent)
        if not groups or groups & layout.full_mask != layout.full_mask:
            break
        hashes += parent
        end += 1
    if end == found.usable:
        return
    found.first_hash, found.hashes = first, bytes(hashes)
    boundary = end
    if layout.sparse:
        flags = [_with_host(found, group, end, host) for group in layout.sparse]
        boundary = resume([layout.specs[group] for group in layout.sparse], layout.page_tokens, flags, end)
    found.host = max(boundary, found.usable)


def _first_page_of_interest(found: Survey, layout: Layout) -> int:
    """A boundary beyond `usable` needs no WINDOW page before this one."""
    if not layout.sparse:
        return found.matched
    runs = (window_pages(layout.specs[group], layout.page_tokens) for group in layout.window)
    return max(0, found.usable + 1 - max(runs, default=1) - 1)


def _with_host(found: Survey, group: int, end: int, host: HostView) -> bytes:
    """Residency of a group up to `end`, counting the host's pages from the first hash on."""
    flags = bytearray(residency(found.sparse_ids[group]))
    flags += bytes(end - len(flags))
    for page in range(found.first_hash, end):
        if not flags[page] and host.index.groups(host.fingerprint, found.hash_of(page)) >> group & 1:
            flags[page] = 1
    return bytes(flags)


def _last_hash(walk: Walk) -> bytes:
    if walk.child is not None and walk.pages:
        return bytes(walk.child.hashes[(walk.pages - 1) * HASH_BYTES : walk.pages * HASH_BYTES])
    return bytes(walk.node.hashes[-HASH_BYTES:])


def _path_hashes(walk: Walk, first: int) -> bytes:
    """Hashes of the matched pages from page number `first` on."""
    parts: list[bytes | bytearray] = []
    if walk.child is not None:
        parts.append(walk.child.hashes[: walk.pages * HASH_BYTES])
    start = walk.node.end
    node: Node | None = walk.node
    while node is not None and start > first:
        parts.append(node.hashes)
        start, node = node.start, node.parent
    joined = b"".join(reversed(parts))
    skip = first - start
    return joined[skip * HASH_BYTES :]
