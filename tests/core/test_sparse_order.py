"""The evictable order of WINDOW and STATE pages while copies of them are under way.

Knows no tree beyond the node in which the pages stand.
"""

from __future__ import annotations

from cache_service.core.page_pool import pack
from cache_service.core.radix_node import Node, Root
from cache_service.core.sparse_pages import Rank, SparsePages
from tests.core.world import NS, window


def standing(count: int) -> tuple[SparsePages, list[int]]:
    """Pages in the tree, let go of one after the other."""
    pages = SparsePages(0, window(count + 2, 4))
    node = Node(Root(NS, 1), 0, bytes(4 * count), [bytearray(4 * count)], count)
    held = pages.take(count)
    for at, page_id in enumerate(held):
        pages.publish(page_id, node, at)
        pages.drop((page_id,), Rank.WARM)
    return pages, held


def order(pages: SparsePages) -> list[int]:
    return [page_id for rank in pages.orders for page_id in rank]


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
    pages.drop((first,), Rank.WARM)
    pages.drop_unused(first)
    assert order(pages) == [second, third, first]


def test_pages_that_come_back_are_read_and_evicted_like_others() -> None:
    pages, held = standing(8)
    for _ in range(200):  # entries that are no longer true do not pile up
        pages.read(held[:4])
        for page_id in held[:4]:
            pages.drop_unused(page_id)
    assert len(pages.orders[Rank.WARM]._heap) <= 2 * 4 + 65
    pages.read(held[1:2])
    pages.drop(held[1:2], Rank.WARM)
    pages.evict(3)
    assert order(pages) == [*held[4:], held[1]]
    assert pages.pool.num_free == 10 - 5
    pages.read(held[4:5])
    assert pages.discard(pack([*held[5:], held[1]])) == 4
    assert order(pages) == []
