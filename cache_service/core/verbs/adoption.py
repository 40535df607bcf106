"""After the manager lost its state: take over the pages that a worker's live sequence still holds.

Whole computed pages are published as they are. Sequences that shared pages share them again: a page that is in the
tree at the same place is a hit. Pages that are not whole and computed stay private. The tree is walked once, and bytes
are compared as bytes: the cost is that of the sequence's own pages, whatever the pool's size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from cache_service.core.device.device_cache import DeviceCache
from cache_service.core.device.lease_table import HeldSlot, Lease, WindowHold
from cache_service.core.device.page_pool import PagePool, unpack
from cache_service.core.device.radix_tree import Walk
from cache_service.core.kinds.rule import GroupRule
from cache_service.core.verbs import leasing, publishing
from cache_service.core.verbs.step_check import check_sequence, check_tokens
from session.errors import InvalidInput
from session.messages import Adopt, Grant, Refusal
from session.words import (
    PAGE_ID_BYTES,
    GroupPages,
    Match,
    MissReason,
    PageId,
    RefusalReason,
    SnapshotSlot,
)


@dataclass(slots=True)
class WindowClaim:
    """Pages of one WINDOW group: `hits` stand in the tree, `fresh` must be free."""

    hold: WindowHold
    hits: list[int]
    fresh: list[int]


@dataclass(slots=True)
class Claim:
    """What the worker says that the sequence holds. The first `shared` pages of its path stand in the tree already."""

    walk: Walk | None
    shared: int
    own: dict[int, bytes] = field(default_factory=dict)  # by FULL group: the pages from `shared` on
    windows: dict[int, WindowClaim] = field(default_factory=dict)


def adopt(cache: DeviceCache, item: Adopt) -> Grant | Refusal:
    """Refused (queue it again) where a page that it names is somebody else's by now; nothing changed then."""
    _check(cache, item)
    claim = _claimed(cache, item)
    if isinstance(claim, str):
        return Refusal(item.sequence_id, RefusalReason.NO_ROOM, claim)
    lease = _commit(cache, item, claim)
    page_tokens = cache.layout.page_tokens
    done = lease.published_pages * page_tokens
    reason = MissReason.BYPASSED if item.bypass_cache else MissReason.NONE
    return Grant(
        sequence_id=item.sequence_id,
        usable_tokens=item.computed_tokens,
        cached_tokens=0,
        fetched_tokens=0,
        tables=leasing.tables(cache, lease),
        match=Match(done, done, 0, "", reason),
        working=item.working,
        rolling=item.rolling,
    )


# Checks.


def _check(cache: DeviceCache, adopt: Adopt) -> None:
    check_sequence(cache, adopt.sequence_id, adopt.namespace)
    num_tokens = check_tokens(adopt.tokens, "tokens", cache.config.max_sequence_tokens)
    if not 0 <= adopt.computed_tokens <= num_tokens:
        raise InvalidInput("computed_tokens", f"{adopt.computed_tokens} is not in 0..{num_tokens}")
    expected = sorted((*cache.layout.full, *cache.layout.window))
    if sorted(table.group for table in adopt.tables) != expected:
        raise InvalidInput("tables", f"one table for each of the groups {expected} is needed")
    computed_pages = cache.layout.pages(adopt.computed_tokens)
    for number, table in enumerate(adopt.tables):
        _check_table(table, cache.layout.rules[table.group], f"tables[{number}]", computed_pages)
    lengths = {len(table.page_ids) for table in adopt.tables if table.group in cache.pools}
    if len(lengths) > 1:
        raise InvalidInput("tables", "the tables of FULL groups must have the same length")
    _check_slots(cache, adopt)


def _check_table(table: GroupPages, rule: GroupRule, where: str, computed_pages: int) -> None:
    spec = rule.spec
    num_pages, rest = divmod(len(table.page_ids), PAGE_ID_BYTES)
    if rest or table.first_page < 0:
        raise InvalidInput(f"{where}.page_ids", "is no whole number of uint32 page ids")
    ids = array("I")
    ids.frombytes(table.page_ids)
    if max(ids, default=0) > spec.num_pages:
        raise InvalidInput(f"{where}.page_ids", f"names a page beyond the pool of {spec.num_pages}")
    num_holes = ids.count(0)
    if len(set(ids)) - (num_holes > 0) != num_pages - num_holes:
        raise InvalidInput(f"{where}.page_ids", "names a page twice")
    if table.first_page + num_pages < computed_pages:
        raise InvalidInput(f"{where}.page_ids", "does not cover the computed tokens")
    if not rule.has_holes and (table.first_page or num_holes):
        raise InvalidInput(f"{where}.page_ids", f"a {spec.kind.name} group has no holes")


def _check_slots(cache: DeviceCache, adopt: Adopt) -> None:
    for name, slots in (("working", adopt.working), ("rolling", adopt.rolling)):
        if [slot.group for slot in slots] != sorted({slot.group for slot in slots} & set(cache.layout.state)):
            raise InvalidInput(name, "names a group twice, out of order, or one without slots")
    if [slot.group for slot in adopt.working] != list(cache.layout.state):
        raise InvalidInput("working", "one slot for each STATE group is needed")


# The claim: reads only.


def _claimed(cache: DeviceCache, adopt: Adopt) -> Claim | str:
    """What is to be taken, or which page is neither free nor standing in the tree at this very place."""
    layout = cache.layout
    claim = Claim(None, 0)
    root = None if adopt.bypass_cache else cache.tree.roots.get(adopt.namespace)
    if root is not None:
        limit = adopt.computed_tokens // layout.page_tokens
        claim.walk = cache.tree.walk(root, adopt.tokens, 0, limit * layout.page_key_bytes)
        claim.shared = claim.walk.end
    for table in adopt.tables:
        rule = layout.rules[table.group]
        standing = _standing(cache, claim.walk, table.group)
        if not rule.has_holes:
            pool = cache.pools[table.group]
            taken = _claim_full(pool, claim, table, standing)
        else:
            pool = cache.sparse[table.group].pool
            claim.windows[table.group] = window = _window(cache, adopt, table, unpack(standing))
            taken = _first_taken(pool, window.fresh)
        if taken:
            return f"page {taken} of group {rule.spec.name} is taken"
    return _taken_slot(cache, (*adopt.working, *adopt.rolling)) or claim


def _standing(cache: DeviceCache, walk: Walk | None, group: int) -> bytes:
    """The tree's pages of the shared part of the path."""
    if walk is None:
        return b""
    parts = [node.pages[group] for node in cache.tree.path(walk.node)]
    if walk.child is not None:
        parts.append(walk.child.pages[group][: walk.pages * PAGE_ID_BYTES])
    return b"".join(parts)


def _claim_full(pool: PagePool, claim: Claim, table: GroupPages, standing: bytes) -> int:
    """Returns a page that is taken; 0 for none. Duplicates of what stands are left free: the grant shows the others."""
    shared, own = table.page_ids[: len(standing)], table.page_ids[len(standing) :]
    claim.own[table.group] = own
    if shared != standing:
        pairs = zip(unpack(shared), unpack(standing), strict=True)
        taken = _first_taken(pool, (page_id for page_id, in_tree in pairs if page_id != in_tree))
        if taken:
            return taken
    return _first_taken(pool, unpack(own))


def _window(cache: DeviceCache, adopt: Adopt, table: GroupPages, standing: list[int]) -> WindowClaim:
    spec = cache.layout.specs[table.group]
    first = cache.layout.rules[table.group].first_page(adopt.computed_tokens)
    kept = unpack(table.page_ids)[max(first - table.first_page, 0) :]
    if first < table.first_page or not all(kept):
        raise InvalidInput("tables", f"group {spec.name} has a hole inside its window")
    claim = WindowClaim(WindowHold(first, kept), [], [])
    for page, page_id in enumerate(kept, first):
        is_hit = page < len(standing) and standing[page] == page_id
        (claim.hits if is_hit else claim.fresh).append(page_id)
    return claim


def _first_taken(pool: PagePool, page_ids: Iterable[int]) -> int:
    return next((page_id for page_id in page_ids if not pool.is_free(page_id)), 0)


def _taken_slot(cache: DeviceCache, slots: tuple[SnapshotSlot, ...]) -> str | None:
    seen: set[tuple[int, PageId]] = set()
    for slot in slots:
        if (slot.group, slot.slot) in seen or not cache.sparse[slot.group].pool.is_free(slot.slot):
            return f"slot {slot.slot} of group {cache.layout.specs[slot.group].name} is taken"
        seen.add((slot.group, slot.slot))
    return None


# The commit: cannot fail.


def _commit(cache: DeviceCache, adopt: Adopt, claim: Claim) -> Lease:
    """Pins the shared part, claims the rest as private pages, and publishes what is computed and whole."""
    tree, walk = cache.tree, claim.walk
    private = [bytearray()] * len(cache.layout.specs)
    for group, own in claim.own.items():
        private[group] = bytearray(own)
        cache.pools[group].claim(frozenset(unpack(own)))
    for group, window in claim.windows.items():
        cache.sparse[group].claim(frozenset(window.fresh))
        cache.sparse[group].read(window.hits)
    for slot in (*adopt.working, *adopt.rolling):
        cache.sparse[slot.group].claim(frozenset((int(slot.slot),)))
    node = tree.root(adopt.namespace) if walk is None else tree.node_at(walk)
    tree.pin(node)
    own_pages = max((len(own) // PAGE_ID_BYTES for own in claim.own.values()), default=0)
    lease = Lease(
        sequence_id=adopt.sequence_id,
        namespace=adopt.namespace,
        prompt=adopt.tokens,
        node=node,
        published_pages=claim.shared,
        computed_tokens=adopt.computed_tokens,
        priority=adopt.priority,
        chunk_tokens=0,
        resumed_pages=claim.shared,
        matched_pages=claim.shared,
        private=private,
        full_end=claim.shared + own_pages,
        windows={group: window.hold for group, window in claim.windows.items()},
        working=tuple(HeldSlot(slot.group, slot.slot) for slot in adopt.working),
        rolling=tuple(HeldSlot(slot.group, slot.slot) for slot in adopt.rolling),
        room_tokens=adopt.computed_tokens,
        bypass=adopt.bypass_cache,
    )
    cache.leases.add(lease)
    publishing.publish(cache, lease, b"", adopt.computed_tokens)
    return lease
