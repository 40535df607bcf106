"""The evictable order of WINDOW and STATE pages: while copies are under way, and by the worth of their nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.core.device.eviction_order import POLICIES, Adaptive, Lru, make_policy
from cache_service.core.device.page_pool import pack
from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device.sparse_pages import Retention, SparsePages
from cache_service.core.device.window_order import WindowPages
from session.words import GroupSpec
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import span
from tests.core.world import NS, World, full, state, window


def standing(count: int) -> tuple[SparsePages, list[int]]:
    """Pages in the tree, let go of one after the other."""
    pages = WindowPages(0, window(count + 2, 4), Lru())
    node = Node(Root(NS, 1), 0, bytes(4 * count), [bytearray(4 * count)], count)
    held = pages.take(count)
    for at, page_id in enumerate(held):
        pages.publish(page_id, node, at)
        pages.drop((page_id,), Retention.WARM)
    return pages, held


def order(pages: SparsePages) -> list[int]:
    return [page_id for page_ids in pages.order().values() for page_id in page_ids]


def test_a_copied_page_comes_back_to_its_place() -> None:
    pages, held = standing(6)
    for chosen in (held[:2], held[2:4], held[::2], held):
        pages.read(chosen)
        assert pages.num_evictable == 6 - len(chosen)
        for page_id in chosen:
            pages.drop_unused(page_id)
        assert order(pages) == held
    pages.evict(4)
    assert order(pages) == held[4:]


def test_a_use_during_the_copy_counts() -> None:
    pages, (first, second, third) = standing(3)
    pages.read((first,))
    pages.read((first,))
    pages.drop((first,), Retention.WARM)
    pages.drop_unused(first)
    assert order(pages) == [second, third, first]


def test_pages_that_come_back_are_read_and_evicted_like_others() -> None:
    pages, held = standing(8)
    for _ in range(200):  # entries that are no longer true do not pile up
        pages.read(held[:4])
        for page_id in held[:4]:
            pages.drop_unused(page_id)
    assert len(pages._orders[Retention.WARM, 0]._heap) <= 2 * 4 + 65
    pages.read(held[1:2])
    pages.drop(held[1:2], Retention.WARM)
    pages.evict(3)
    assert order(pages) == [*held[4:], held[1]]
    assert pages.pool.num_free == 10 - 5
    pages.read(held[4:5])
    assert pages.discard(pack([*held[5:], held[1]])) == 4
    assert order(pages) == []


@settings(deadline=None, max_examples=200)
@given(
    name=st.sampled_from(list(POLICIES)),
    ratio=st.sampled_from([1.0, 2.5, 1e9]),
    touches=st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.integers(-1, 1)), min_size=1, max_size=40),
)
def test_warm_pages_go_in_the_order_of_their_nodes(
    name: str, ratio: float, touches: list[tuple[int, bool, int]]
) -> None:
    policy = make_policy(name, 8)
    if isinstance(policy, Adaptive):
        policy.lifetimes.ratio = ratio
    pages = WindowPages(0, window(8, 4), policy)
    nodes = [Node(Root(NS, 1), 0, bytes(4), [bytearray(4)], 1) for _ in range(8)]
    page_of = dict(zip(nodes, pages.take(8), strict=True))
    for node, page_id in page_of.items():
        pages.publish(page_id, node, 0)
    for at, is_again, priority in touches:
        node = nodes[at]
        if node.queue is not None:
            policy.remove(node)
            pages.read((page_of[node],))
        elif page_of[node] not in pages.readers:
            continue
        node.uses, node.priority = max(node.uses, is_again), priority
        if isinstance(policy, Adaptive):
            policy.lifetimes.clock += 1
        policy.add(node)
        pages.drop((page_of[node],), Retention.WARM)
    wanted = [page_of[node] for node in policy.order()]
    freed = []
    for _ in wanted:
        before = set(pages.places)
        pages.evict(1)
        freed += before - set(pages.places)
    assert freed == wanted


STATES, WINDOWS = (full(4096), state(12)), (full(4096), window(24, 8))


@pytest.mark.parametrize(
    ("groups", "policy", "usable"),
    [*((STATES, policy, 16) for policy in POLICIES), (WINDOWS, "slru", 16), (WINDOWS, "lru", 0)],
)
def test_prompts_that_come_once_do_not_push_out_what_is_reused(
    groups: tuple[GroupSpec, ...], policy: str, usable: int
) -> None:
    """Snapshots go by their own worth under each policy; windows as the policy says."""
    worker = FakeWorker(World(policy=policy), groups, 4)
    trunk = span(1, 16)
    for first in (1000, 2000, 3000):
        worker.run([*trunk, *span(first, first + 2)])
    assert worker.world.tokens_cached([*trunk, 7]) == 16
    for first in range(10_000, 50_000, 1_000):
        worker.run(span(first, first + 18))
    assert worker.world.tokens_cached([*trunk, 7]) == usable, "all tokens are there, what resumes them is not"
    live = worker.start([*trunk, 7])
    assert live.grant.usable_tokens == usable
    worker.prefill(live)
    worker.release(live)
