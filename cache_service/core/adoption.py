"""Take over a live sequence after a manager restart: whole computed pages are published as they stand.

Knows no session. Sequences that shared pages share them again: a page that stands in the tree at the same place is a
hit. Pages that are not whole and computed stay private.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_service.core import leasing, publishing
from cache_service.core.device_cache import DeviceCache
from cache_service.core.errors import InvalidInput
from cache_service.core.lease_table import HeldSlot, Lease, WindowHold
from cache_service.core.page_pool import pack, unpack
from cache_service.core.resume import window_start
from cache_service.core.step_check import check_one_acquire
from cache_service.core.types import (
    PAGE_ID_BYTES,
    TOKEN_BYTES,
    Acquire,
    Adopt,
    Grant,
    GroupKind,
    Match,
    MissReason,
    Refusal,
    RefusalReason,
)


@dataclass(slots=True)
class Claim:
    """What the worker says that the sequence holds. `shared` pages of the path stand in the tree already."""

    shared: int = 0
    full: dict[int, list[int]] = field(default_factory=dict)
    windows: dict[int, WindowHold] = field(default_factory=dict)


def adopt(cache: DeviceCache, adopt: Adopt) -> Grant | Refusal:
    """Refused (queue it again) where a page that it names is somebody else's by now; nothing changed then."""
    _check(cache, adopt)
    claim = _claim(cache, adopt)
    taken = _taken(cache, adopt, claim)
    if taken:
        return Refusal(adopt.sequence_id, RefusalReason.NO_ROOM, taken)
    lease = _commit(cache, adopt, claim)
    page_tokens = cache.layout.page_tokens
    done = lease.published * page_tokens
    return Grant(
        sequence_id=adopt.sequence_id,
        usable_tokens=adopt.computed_tokens,
        cached_tokens=0,
        fetched_tokens=0,
        tables=leasing.tables(cache, lease),
        match=Match(done, done, 0, "", MissReason.NONE),
        working=adopt.working,
        rolling=adopt.rolling,
    )


def _check(cache: DeviceCache, adopt: Adopt) -> None:
    check_one_acquire(cache, Acquire(adopt.sequence_id, adopt.namespace, adopt.tokens), "adopt")
    num_tokens = len(adopt.tokens) // TOKEN_BYTES
    if not 0 <= adopt.computed_tokens <= num_tokens:
        raise InvalidInput("adopt.computed_tokens", f"{adopt.computed_tokens} is not in 0..{num_tokens}")
    groups = [table.group for table in adopt.tables]
    expected = sorted((*cache.layout.full, *cache.layout.window))
    if sorted(groups) != expected:
        raise InvalidInput("adopt.tables", f"one table for each of the groups {expected} is needed")
    for number, table in enumerate(adopt.tables):
        where, spec = f"adopt.tables[{number}]", cache.layout.specs[table.group]
        if len(table.page_ids) % PAGE_ID_BYTES or table.first_page < 0:
            raise InvalidInput(f"{where}.page_ids", "is no whole number of uint32 page ids")
        ids = [page_id for page_id in unpack(table.page_ids) if page_id]
        if len(set(ids)) != len(ids) or any(page_id > spec.num_pages for page_id in ids):
            raise InvalidInput(f"{where}.page_ids", "names a page twice or beyond the pool")
        if table.first_page + len(table.page_ids) // PAGE_ID_BYTES < cache.layout.pages(adopt.computed_tokens):
            raise InvalidInput(f"{where}.page_ids", "does not cover the computed tokens")
        if spec.kind == GroupKind.FULL and (table.first_page or len(ids) * PAGE_ID_BYTES != len(table.page_ids)):
            raise InvalidInput(f"{where}.page_ids", "a FULL group has no holes")
    for name, slots in (("working", adopt.working), ("rolling", adopt.rolling)):
        if [slot.group for slot in slots] != sorted({slot.group for slot in slots} & set(cache.layout.state)):
            raise InvalidInput(f"adopt.{name}", "names a group twice, out of order, or one without slots")
    if [slot.group for slot in adopt.working] != list(cache.layout.state):
        raise InvalidInput("adopt.working", "one slot for each STATE group is needed")


def _claim(cache: DeviceCache, adopt: Adopt) -> Claim:
    claim = Claim()
    page_tokens = cache.layout.page_tokens
    limit = adopt.computed_tokens // page_tokens
    root = cache.tree.roots.get(adopt.namespace)
    if root is not None:
        walk = cache.tree.walk(root, adopt.tokens, 0, limit * cache.layout.page_bytes)
        claim.shared = walk.end
    for table in adopt.tables:
        ids, spec = unpack(table.page_ids), cache.layout.specs[table.group]
        if spec.kind == GroupKind.FULL:
            claim.full[table.group] = ids
            continue
        first = window_start(adopt.computed_tokens, spec, page_tokens)
        kept = ids[max(first - table.first_page, 0) :]
        if first < table.first_page or not all(kept):
            raise InvalidInput("adopt.tables", f"group {spec.name} has a hole inside its window")
        claim.windows[table.group] = WindowHold(first, kept)
    return claim


def _taken(cache: DeviceCache, adopt: Adopt, claim: Claim) -> str:
    """The first page that is neither free nor standing in the tree at this very place; empty when there is none."""
    for group, ids in claim.full.items():
        standing = _standing(cache, adopt, claim, group)
        for page, page_id in enumerate(ids):
            if not cache.pools[group].is_free(page_id) and (page >= len(standing) or standing[page] != page_id):
                return f"page {page_id} of group {cache.layout.specs[group].name} is taken"
    for group, hold in claim.windows.items():
        standing = _standing(cache, adopt, claim, group)
        for page, page_id in enumerate(hold.page_ids, hold.first):
            is_hit = page < len(standing) and standing[page] == page_id
            if not is_hit and not cache.sparse[group].pool.is_free(page_id):
                return f"page {page_id} of group {cache.layout.specs[group].name} is taken"
    slots = [(slot.group, int(slot.slot)) for slot in (*adopt.working, *adopt.rolling)]
    for group, slot in slots:
        if slots.count((group, slot)) > 1 or not cache.sparse[group].pool.is_free(slot):
            return f"slot {slot} of group {cache.layout.specs[group].name} is taken"
    return ""


def _standing(cache: DeviceCache, adopt: Adopt, claim: Claim, group: int) -> list[int]:
    """The tree's pages of the shared part of the path."""
    root = cache.tree.roots.get(adopt.namespace)
    if root is None:
        return []
    walk = cache.tree.walk(root, adopt.tokens, 0, claim.shared * cache.layout.page_bytes)
    parts = [node.pages[group] for node in cache.tree.path(walk.node)]
    if walk.child is not None:
        parts.append(walk.child.pages[group][: walk.pages * PAGE_ID_BYTES])
    return unpack(b"".join(parts))


def _commit(cache: DeviceCache, adopt: Adopt, claim: Claim) -> Lease:
    """Pins the shared part, claims the rest as private pages, and publishes what is computed and whole."""
    tree = cache.tree
    root = tree.root(adopt.namespace)
    private = [bytearray()] * len(cache.layout.specs)
    for group, ids in claim.full.items():
        private[group] = bytearray(pack(ids[claim.shared :]))
        standing = _standing(cache, adopt, claim, group)
        fresh = [page_id for page, page_id in enumerate(ids) if page >= len(standing) or standing[page] != page_id]
        cache.pools[group].claim(frozenset(fresh))
        # Duplicates of pages that stand in the tree: the grant's table shows the canonical ones.
        cache.pools[group].give(pack(fresh[: len(fresh) - len(ids[claim.shared :])]))
    for group, hold in claim.windows.items():
        _claim_window(cache, hold, _standing(cache, adopt, claim, group), group)
    for slot in (*adopt.working, *adopt.rolling):
        cache.sparse[slot.group].claim(frozenset((int(slot.slot),)))
    walk = tree.walk(root, adopt.tokens, 0, claim.shared * cache.layout.page_bytes)
    node = tree.split(walk.child, walk.pages) if walk.child is not None and walk.pages else walk.node
    tree.pin(node)
    lease = Lease(
        sequence_id=adopt.sequence_id,
        namespace=adopt.namespace,
        prompt=adopt.tokens,
        node=node,
        published=claim.shared,
        computed=adopt.computed_tokens,
        priority=adopt.priority,
        chunk_tokens=0,
        resumed=claim.shared,
        matched=claim.shared,
        private=private,
        full_end=max([claim.shared, *map(len, claim.full.values())]),
        windows=claim.windows,
        working=tuple(HeldSlot(slot.group, slot.slot) for slot in adopt.working),
        rolling=tuple(HeldSlot(slot.group, slot.slot) for slot in adopt.rolling),
        room=adopt.computed_tokens,
    )
    cache.leases.add(lease)
    publishing.publish(cache, lease, b"", adopt.computed_tokens)
    return lease


def _claim_window(cache: DeviceCache, hold: WindowHold, standing: list[int], group: int) -> None:
    pages = cache.sparse[group]
    hits: list[int] = []
    fresh: list[int] = []
    for at, page in enumerate(range(hold.first, hold.end)):
        is_hit = page < len(standing) and standing[page] == hold.page_ids[at]
        (hits if is_hit else fresh).append(hold.page_ids[at])
    pages.claim(frozenset(fresh))
    pages.read(hits)
