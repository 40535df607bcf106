"""Proof that the manager's books agree, by recomputing them the slow way. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cache_service.core.base.page_hash import page_hashes
from cache_service.core.cache_manager import CacheManager
from cache_service.core.device.page_pool import PagePool, unpack
from cache_service.core.device.radix_node import Node
from cache_service.core.device.sparse_pages import Retention
from cache_service.core.device_cache import DeviceCache
from cache_service.core.host.hash_index import HashIndex
from cache_service.core.kinds.group import Group, present
from cache_service.core.kinds.sparse_group import SparseGroup
from session.words import HASH_BYTES, PAGE_ID_BYTES, Transfer, WorkerId


def check(manager: CacheManager) -> None:
    """Raises AssertionError that says what is wrong."""
    for worker_id, worker in manager.workers.items():
        cache = worker.cache
        where = f"worker {worker_id}"
        nodes = list(nodes_of(cache))
        _check_shape(cache, nodes, where)
        _check_pins(cache, nodes, where)
        _check_leases(cache, where)
        _check_late(cache, where)
        for number in cache.pools:
            _check_full_pool(cache, nodes, cache.groups[number], f"{where}, group {number}")
        for sparse in cache.sparse:
            _check_sparse_pool(cache, nodes, sparse, f"{where}, group {sparse.number}")
        _check_hashes(cache, nodes, where)
        cache.kept.check()
    num_bytes = sum(worker.cache.leases.num_bytes for worker in manager.workers.values())
    assert manager.lease_bytes.num_bytes == num_bytes, "bytes of all workers' leases"
    _check_host(manager)


def nodes_of(cache: DeviceCache) -> Iterator[Node]:
    """Every node but the roots, parents first."""
    pending: list[Node] = [*cache.tree.roots.values(), *cache.tree.detached]
    for node in pending:
        pending.extend(node.children.values())
        if node.parent is not None:
            yield node


def _check_shape(cache: DeviceCache, nodes: list[Node], where: str) -> None:
    tree, size = cache.tree, cache.layout.page_key_bytes
    num_nodes = evictable = 0
    for node in nodes:
        parent = node.parent
        assert parent is not None
        pages = len(node.key) // size
        num_nodes += 1
        assert pages * size == len(node.key) and pages, f"{where}: a node has no whole page"
        assert parent.children.get(bytes(node.key[:size])) is node, f"{where}: a node is filed under a wrong key"
        assert node.start == parent.end and node.root is parent.root, f"{where}: a node starts at a wrong page"
        assert node.resident == pages, f"{where}: {node.resident} pages counted, tokens of {pages}"
        for group, ids in enumerate(node.pages):
            held = len(ids) // PAGE_ID_BYTES
            assert held == node.resident, f"{where}: node at {node.start} has {held} pages of group {group}"
        if not node.pins:
            evictable += node.resident
            is_older = parent.parent is None or parent.pins > 0 or node.used_ms <= parent.used_ms
            assert is_older, f"{where}: node at {node.start} was used after the one above"
        is_leaf = node.pins == node.ticket_pins and not node.children
        assert (node.queue is not None) == is_leaf, f"{where}: evictable order and leaf at {node.start} disagree"
        assert node.queue is None or node in node.queue, f"{where}: a node is not in its queue"
    assert tree.num_nodes == num_nodes, f"{where}: {tree.num_nodes} nodes counted, {num_nodes} there"
    assert tree.evictable_pages == evictable, f"{where}: {tree.evictable_pages} evictable counted, {evictable} there"
    tree.ghosts.check()
    order = list(cache.policy.order())
    leaves = {node for node in nodes if node.queue is not None}
    assert len(order) == len(leaves) and set(order) == leaves, f"{where}: the policy's order is not the leaves"
    gone = [node for node in cache.spill_queue if not node.resident]
    assert not gone, f"{where}: a node that left the tree is kept"


def _check_pins(cache: DeviceCache, nodes: list[Node], where: str) -> None:
    own: Counter[int] = Counter()
    tickets: Counter[int] = Counter()
    for lease in cache.leases.all():
        own[id(lease.node)] += 1
    for spill in cache.transfers.spills.values():
        own[id(spill.node)] += 1
        tickets[id(spill.node)] += 1
    for root in (*cache.tree.roots.values(), *cache.tree.detached):
        own[id(root)] += 1
        is_empty = not root.children and own[id(root)] == 1
        assert not is_empty or root in cache.tree.detached, f"{where}: an empty root stands"
    for node in (*cache.tree.roots.values(), *cache.tree.detached, *nodes):
        pins = own.pop(id(node), 0) + sum(1 for child in node.children.values() if child.pins)
        assert node.pins == pins, f"{where}: node at {node.start} counts {node.pins} pins, {pins} hold it"
        assert node.ticket_pins == tickets.pop(id(node), 0), f"{where}: ticket pins of node at {node.start}"
    assert not own and not tickets, f"{where}: a holder's node is not in the tree"


def _check_leases(cache: DeviceCache, where: str) -> None:
    size = cache.layout.page_key_bytes
    for lease in cache.leases.all():
        name = f"{where}, sequence {lease.sequence_id}"
        assert lease.node.end == lease.published_pages, (
            f"{name}: cursor at {lease.node.end}, published {lease.published_pages}"
        )
        path = b"".join(bytes(node.key) for node in cache.tree.path(lease.node))
        assert path == lease.tokens(0, lease.published_pages * size), f"{name}: its node is not on its path"
        assert lease.node.root.namespace == lease.namespace, f"{name}: its node is in another namespace"
        assert lease.computed_tokens <= lease.num_tokens, f"{name}: computed more than it has"
        if not lease.fetches:
            whole = lease.computed_tokens // cache.layout.page_tokens
            assert lease.published_pages >= whole or lease.bypass, f"{name}: whole pages are not published"
            assert not (lease.bypass and lease.published_pages), f"{name}: bypasses the cache, and published"
        else:
            waiting = lease.fetches <= cache.transfers.fetches.keys()
            assert waiting, f"{name}: waits for a closed ticket"
        for group in cache.groups:
            held = unpack(group.held(lease))
            assert all(held), f"{name}: holds a hole of group {group.number}"
            end = lease.published_pages + len(held) if group.number in cache.pools else lease.full_end
            assert lease.full_end == end, f"{name}: group {group.number} ends at {end}, not at {lease.full_end}"


def _conserved(pool: PagePool, held: list[int], where: str) -> None:
    """Every page once: free, never handed out, or held."""
    pages = [*unpack(pool.free_ids()), *held]
    distinct = set(pages)
    if len(distinct) < len(pages):
        twice = sorted(page_id for page_id, count in Counter(pages).items() if count > 1)
        raise AssertionError(f"{where}: pages {twice[:5]} are in two places")
    ahead = pool.claimed_ahead
    pool.check()
    known = distinct.difference(ahead)
    assert not known or 0 < min(known) <= max(known) < pool.fresh, f"{where}: a page never handed out"
    lost = pool.fresh - 1 + len(ahead) - len(distinct)
    assert not lost, f"{where}: {lost} pages are lost"
    assert pool.num_free == pool.num_pages - len(held), f"{where}: free count"


def _check_late(cache: DeviceCache, where: str) -> None:
    late, age_ms = cache.transfers.late, cache.config.max_spill_ms
    for ticket, fetch in cache.transfers.fetches.items():
        assert ticket not in late or cache.now_ms - fetch.opened_ms >= age_ms, f"{where}: fetch {ticket} is not late"
    assert late <= cache.transfers.fetches.keys(), f"{where}: a closed fetch counts as late"


def _moved(transfer: Transfer, group: Group) -> list[int]:
    return [page_id for row in transfer.groups if row.group == group.number for page_id in present(row.page_ids)]


def _held(cache: DeviceCache, group: Group) -> list[int]:
    """By leases, and by the fetches that outlived theirs."""
    held = [page_id for lease in cache.leases.all() for page_id in unpack(group.held(lease))]
    fetches = [fetch.transfer for fetch in cache.transfers.fetches.values() if fetch.orphaned]
    return held + [page_id for transfer in fetches for page_id in _moved(transfer, group)]


def _check_full_pool(cache: DeviceCache, nodes: list[Node], group: Group, where: str) -> None:
    standing = [page_id for node in nodes for page_id in unpack(node.pages[group.number])]
    _conserved(group.pool, standing + _held(cache, group), where)


def _check_sparse_pool(cache: DeviceCache, nodes: list[Node], group: SparseGroup, where: str) -> None:
    pages = group.pages
    standing: dict[int, tuple[Node, int]] = {}
    for node in nodes:
        for at, page_id in enumerate(unpack(node.pages[group.number])):
            if page_id:
                assert page_id not in standing, f"{where}: page {page_id} stands twice in the tree"
                standing[page_id] = (node, node.start + at)
    readers = Counter(_held(cache, group))
    for spill in cache.transfers.spills.values():
        readers.update(_moved(spill.transfer, group))
    assert dict(readers) == pages.readers, f"{where}: readers {pages.readers}, holders {dict(readers)}"
    assert set(standing) == set(pages.places), f"{where}: places are not those of the tree"
    for page_id, place in pages.places.items():
        assert (place.holder(), place.page) == standing[page_id], f"{where}: page {page_id} stands elsewhere"
    pages.check()
    order = pages.order()
    ordered = [page_id for page_ids in order.values() for page_id in page_ids]
    assert len(ordered) == pages.num_evictable, f"{where}: {pages.num_evictable} evictable, {len(ordered)} in order"
    assert len(ordered) == len(set(ordered)), f"{where}: a page is in two orders"
    evictable = {page_id for page_id in standing if page_id not in readers}
    assert set(ordered) == evictable, f"{where}: evictable order {sorted(ordered)}, evictable {sorted(evictable)}"
    for (retention, number), page_ids in order.items():
        assert number == 0 or retention is Retention.WARM, f"{where}: {retention.name} pages have class {number}"
        for page_id in page_ids:
            is_soft = bool(standing[page_id][0].soft_until_ms)
            right = is_soft == (retention is Retention.SOFT)
            assert right, f"{where}: page {page_id} under a pin: {is_soft}, in {retention.name}"
    _conserved(pages.pool, sorted({*standing, *readers}), where)


def _check_hashes(cache: DeviceCache, nodes: list[Node], where: str) -> None:
    size = cache.layout.page_key_bytes
    for node in nodes:
        have = len(node.hashes) // HASH_BYTES
        assert have <= node.resident, f"{where}: more hashes than pages"
        if not have:
            continue
        above = node.parent
        assert above is not None
        whole = above.parent is None or len(above.hashes) == above.resident * HASH_BYTES
        assert whole, f"{where}: node at {node.start} has hashes, and the one above lacks some"
        path = b"".join(bytes(step.key) for step in cache.tree.path(node))[: (node.start + have) * size]
        expected = page_hashes(node.root.digest, b"", path, size)[node.start * HASH_BYTES :]
        assert bytes(node.hashes) == expected, f"{where}: hashes of node at {node.start} are wrong"
    pinned = [node for node in nodes if node.soft_until_ms]
    assert all(node in cache.soft_pins for node in pinned) and len(pinned) == len(cache.soft_pins), f"{where}: pins"
    assert cache.soft_pins.num_pages == sum(node.resident for node in pinned), f"{where}: pinned pages"
    queued = {*cache.spill_queue, *cache.renewals, *cache.renewing}
    assert queued <= set(nodes), f"{where}: a node waits for its spill or renewal and is not in the tree"
    num_bytes = sum(len(lease.prompt) + len(lease.accepted) for lease in cache.leases.all())
    assert cache.leases.num_bytes == num_bytes, f"{where}: bytes of leases"
    for spill in cache.transfers.spills.values():
        assert spill.transfer.num_pages == len(spill.rows), f"{where}: a spill's rows"


def _check_attachments(manager: CacheManager, index: HashIndex, on_the_way: dict[bytes, int]) -> None:
    """Adds what attached engines are writing to `on_the_way`."""
    holds: Counter[int] = Counter()
    reserved = 0
    for attachment in manager.attachments.all.values():
        if attachment.view.index is not index:
            continue
        leases, tickets = attachment.leases.values(), attachment.tickets.values()
        assert attachment.held_pages == sum(len(lease.rows) for lease in leases), "pages under leases"
        assert attachment.writing_pages == sum(len(writing.rows) for writing in tickets), "pages under tickets"
        holds.update(id(row) for lease in leases for _, row in lease.rows)
        for writing in tickets:
            reserved += writing.num_bytes
            assert len(writing.done) < attachment.attach.num_ranks, "a ticket is open that every rank has committed"
            for page_hash, groups in writing.rows:
                key = attachment.view.fingerprint + page_hash
                assert not on_the_way.get(key, 0) & groups, "two write the same page"
                on_the_way[key] = on_the_way.get(key, 0) | groups
    assert index.quota.reserved_bytes == reserved, (
        f"host index reserves {index.quota.reserved_bytes} bytes, tickets {reserved}"
    )
    held = [row for row in index.rows.values() if row.holds]
    assert all(row.holds == holds[id(row)] for row in index.rows.values()), "holds of a row are not those of leases"
    counted = (index.quota.num_held, index.quota.held_bytes)
    assert counted == (len(held), sum(row.num_bytes for row in held)), f"held rows and bytes are counted as {counted}"


def _check_readers(manager: CacheManager, index: HashIndex) -> None:
    """A breaker for each connected worker and each attached engine of the store, and none beside."""
    hosts = {name: worker.cache.host for name, worker in manager.workers.items() if worker.connected}
    readers: set[WorkerId | int] = {name for name, host in hosts.items() if host is not None and host.index is index}
    readers |= {number for number, one in manager.attachments.all.items() if one.view.index is index}
    assert index.readers.breakers.keys() == readers, f"breakers of {set(index.readers.breakers)}, readers {readers}"
    assert index.readers.store is index.breaker
    for name in readers.intersection(manager.workers):
        assert index.readers.breakers[name] is manager.workers[WorkerId(str(name))].cache.fetch_breaker, name
    for breaker in (index.breaker, *index.readers.breakers.values()):
        assert breaker.is_open == (breaker.failures >= breaker.failures_to_open), breaker
        assert breaker.open_until_ms is None or breaker.open_until_ms > index.now_ms, breaker
        assert not breaker.is_trying or breaker.failures == breaker.failures_to_open - 1, breaker


def _check_host(manager: CacheManager) -> None:
    for index in manager.tiers.all():
        num_bytes = sum(row.num_bytes for row in index.rows.values())
        assert index.quota.num_bytes == num_bytes, (
            f"host index counts {index.quota.num_bytes} bytes, rows have {num_bytes}"
        )
        most = max(index.quota.max_bytes, index.quota.held_bytes)
        assert num_bytes <= most, f"host index holds {num_bytes} of {most} bytes"
        _check_readers(manager, index)
        on_the_way: dict[bytes, int] = {}
        _check_attachments(manager, index, on_the_way)
        for worker in manager.workers.values():
            host = worker.cache.host
            transfers = worker.cache.transfers
            spills = (*transfers.spills.values(), *transfers.abandoned.values())
            for spill in spills if host is not None and host.index is index else ():
                for row in spill.rows:
                    if row is not None and host is not None:
                        key = host.fingerprint + row.page_hash
                        on_the_way[key] = on_the_way.get(key, 0) | row.groups
        assert on_the_way == index.pending, "host index and open spills disagree on what is on its way"
