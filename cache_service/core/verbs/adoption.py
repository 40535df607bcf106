"""After the manager lost its state: take over the pages that a worker's live sequence still holds.

Whole computed pages are published as they are. Sequences that shared pages share them again: a page that is in the
tree at the same place is a hit. Pages that are not whole and computed stay private. The tree is walked once, and bytes
are compared as bytes: the cost is that of the sequence's own pages, whatever the pool's size.
"""

from __future__ import annotations

from typing import Any

from cache_service.core.device.lease_table import GROWTH, Lease
from cache_service.core.device.radix_node import Root
from cache_service.core.device.radix_tree import Walk
from cache_service.core.device_cache import DeviceCache
from cache_service.core.verbs import leasing, publishing
from cache_service.core.verbs.admission import lacks_lease_bytes
from cache_service.core.verbs.prefix_match import page_ids
from cache_service.core.verbs.step_check import check_page_ids, check_sequence, check_tokens
from session.errors import InvalidInput
from session.messages import Adopt, Grant, Refusal
from session.words import PAGE_ID_BYTES, TOKEN_BYTES, GroupPages, Match, MissReason, RefusalReason


def adopt(cache: DeviceCache, item: Adopt) -> Grant | Refusal:
    """Returns a refusal (queue it again), which changes nothing, where a page is somebody else's by now, leases hold
    too many bytes, or the namespace was cleared since."""
    _check(cache, item)
    if not item.bypass_cache and cache.restored.is_cleared(item.namespace):
        return Refusal(item.sequence_id, RefusalReason.NO_ROOM, "the namespace was cleared")
    lacks_bytes = lacks_lease_bytes(cache, len(item.tokens), GROWTH)
    if lacks_bytes is not None:
        return Refusal(item.sequence_id, RefusalReason.NO_ROOM, lacks_bytes)
    walk = _shared(cache, item)
    claims = [group.claim(item, page_ids(cache.tree, walk, group.number)) for group in cache.groups]
    taken = next((claim for claim in claims if isinstance(claim, str)), None)
    if taken is not None:
        return Refusal(item.sequence_id, RefusalReason.NO_ROOM, taken)
    lease = _commit(cache, item, walk, claims)
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
    expected = [group.number for group in cache.groups if group.has_table]
    if sorted(table.group for table in adopt.tables) != expected:
        raise InvalidInput("tables", f"one table for each of the groups {expected} is needed")
    computed_pages = cache.layout.pages(adopt.computed_tokens)
    for number, table in enumerate(adopt.tables):
        _check_table(table, cache.groups[table.group].spec.num_pages, f"tables[{number}].page_ids", computed_pages)
    lengths = {len(table.page_ids) for table in adopt.tables if table.group in cache.pools}
    if len(lengths) > 1:
        raise InvalidInput("tables", "the tables of FULL groups must have the same length")
    _check_slots(cache, adopt)


def _check_table(table: GroupPages, pool_pages: int, where: str, computed_pages: int) -> None:
    num_pages, rest = divmod(len(table.page_ids), PAGE_ID_BYTES)
    if rest or table.first_page < 0:
        raise InvalidInput(where, "is no whole number of uint32 page ids")
    check_page_ids(table.page_ids, pool_pages, where)
    if table.first_page + num_pages < computed_pages:
        raise InvalidInput(where, "does not cover the computed tokens")


def _check_slots(cache: DeviceCache, adopt: Adopt) -> None:
    expected = [group.number for group in cache.groups if not group.has_table]
    for name, slots in (("working", adopt.working), ("rolling", adopt.rolling)):
        if [slot.group for slot in slots] != sorted({slot.group for slot in slots} & set(expected)):
            raise InvalidInput(name, "names a group twice, out of order, or one without slots")
    if [slot.group for slot in adopt.working] != expected:
        raise InvalidInput("working", "one slot for each STATE group is needed")


def _shared(cache: DeviceCache, adopt: Adopt) -> Walk:
    """Returns the part of the computed path that is already in the tree."""
    layout, root = cache.layout, cache.tree.roots.get(adopt.namespace)
    if root is None or adopt.bypass_cache:
        return Walk(Root(adopt.namespace, len(cache.groups)), None, 0)
    limit = adopt.computed_tokens // layout.page_tokens
    return cache.tree.walk(root, adopt.tokens, 0, limit * layout.page_key_bytes)


def _asked_tokens(adopt: Adopt) -> int:
    """Returns up to where launches may go without an extend: a slot for a boundary before that would never be written.

    A sequence that decodes computes its last token in the pages that it has; a prompt's next chunk is asked for.
    """
    num_tokens = len(adopt.tokens) // TOKEN_BYTES
    return num_tokens if num_tokens <= adopt.computed_tokens + 1 else adopt.computed_tokens


# The commit: cannot fail.


def _commit(cache: DeviceCache, adopt: Adopt, walk: Walk, claims: list[Any]) -> Lease:
    """Pins the shared part, claims the rest as private pages, and publishes what is computed and whole."""
    node = cache.tree.node_at(walk)
    if node.parent is None:
        node = cache.tree.root(adopt.namespace)
    cache.tree.pin(node)
    lease = Lease(
        sequence_id=adopt.sequence_id,
        namespace=adopt.namespace,
        prompt=adopt.tokens,
        node=node,
        published_pages=node.end,
        computed_tokens=adopt.computed_tokens,
        priority=adopt.priority,
        chunk_tokens=0,
        resumed_pages=node.end,
        matched_pages=node.end,
        holds=[None] * len(cache.groups),
        full_end=node.end,
        room_tokens=_asked_tokens(adopt),
        bypass=adopt.bypass_cache,
    )
    for group, claim in zip(cache.groups, claims, strict=True):
        group.adopt(lease, claim)
    for step in cache.tree.path(node):  # what the shared part lacks
        for sparse in cache.sparse:
            sparse.merge(lease, step, step.start, step.end, [])
    cache.leases.add(lease)
    publishing.publish(cache, lease, b"", adopt.computed_tokens)
    return lease
