"""The tree alone: walk, split, pins, cuts and ghosts, with no pool behind it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.core.device.eviction_order import Lru, SegmentedLru
from cache_service.core.device.ghost_table import STRIDE_PAGES, Ghost, GhostKind, GhostTable
from cache_service.core.device.page_pool import pack, unpack
from cache_service.core.device.radix_node import Node
from cache_service.core.device.radix_tree import RadixTree, Walk
from session.words import Namespace
from tests.core.forms import python_only

NS = Namespace("model")
PAGE = 2


def tokens(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def make(ghost_limit: int = 100) -> RadixTree:
    return RadixTree(PAGE, 1, Lru(), GhostTable(ghost_limit, 10_000))


def put(tree: RadixTree, parent: Node, packed: bytes, first_id: int) -> Node:
    """A leaf, published and let go."""
    count = len(packed) // (4 * PAGE)
    leaf = tree.attach(parent, packed, [bytearray(pack(list(range(first_id, first_id + count))))], count)
    tree.pin(leaf)
    tree.unpin(leaf)
    return leaf


def test_walk_stops_inside_a_node_at_a_page_boundary() -> None:
    tree = make()
    leaf = put(tree, tree.root(NS), tokens(1, 2, 3, 4, 5, 6), 1)
    prompt = tokens(1, 2, 3, 4, 5, 9)
    walk = tree.walk(tree.root(NS), prompt, 0, len(prompt))
    assert walk == Walk(tree.root(NS), leaf, pages=2)
    assert walk.end == 2 and tree.num_nodes == 1


def test_the_lower_half_of_a_split_keeps_its_identity() -> None:
    tree = make()
    leaf = put(tree, tree.root(NS), tokens(1, 2, 3, 4, 5, 6), 1)
    tree.pin(leaf)
    top = tree.split(leaf, 1)
    assert (unpack(top.pages[0]), unpack(leaf.pages[0])) == ([1], [2, 3])
    assert leaf.parent is top and leaf.start == 1 and (top.pins, leaf.pins) == (1, 1)
    tree.unpin(leaf)
    assert (top.pins, leaf.pins, tree.evictable_pages) == (0, 0, 3)


def test_a_pin_stops_at_the_first_pinned_ancestor() -> None:
    tree = make()
    trunk = put(tree, tree.root(NS), tokens(1, 2), 1)
    one, two = put(tree, trunk, tokens(3, 4), 2), put(tree, trunk, tokens(5, 6), 3)
    tree.pin(one)
    tree.pin(two)
    assert (trunk.pins, tree.root(NS).pins, tree.evictable_pages) == (2, 2, 0)
    tree.unpin(one)
    assert (trunk.pins, tree.evictable_pages) == (1, 1)


def test_a_cut_tail_reads_evicted_and_comes_back() -> None:
    tree = make()
    root = tree.root(NS)
    leaf = put(tree, root, tokens(1, 2, 3, 4, 5, 6), 1)
    prompt = tokens(1, 2, 3, 4, 5, 6)
    assert unpack(tree.cut(leaf, 1)[0]) == [3]
    assert unpack(tree.cut(leaf, 1)[0]) == [2]
    assert tree.walk(root, prompt[: 2 * 4], 0, 2 * 4) == Walk(leaf, None, pages=0)
    assert tree.run_marks.find(root, prompt, 1) == Ghost(GhostKind.ONCE, 1, 0)
    assert tree.run_marks.find(root, prompt, 0) is None and tree.ghosts.num_pages == 2
    assert tree.run_marks.take(leaf, prompt, 2 * 4, len(prompt)) == 2
    assert tree.run_marks.take(leaf, prompt, 2 * 4, len(prompt)) == 0 == tree.ghosts.num_pages


def test_a_node_without_pages_leaves_and_an_empty_root_goes() -> None:
    tree = make()
    leaves = [put(tree, tree.root(NS), tokens(i, i, i, 0), i) for i in (1, 2)]
    tree.cut(leaves[0], 2)
    assert tree.num_nodes == 1 and list(tree.policy.order()) == [leaves[1]]
    tree.cut(leaves[1], 2, is_cleared=True)
    assert not tree.roots and not tree.num_nodes and tree.ghosts.num_pages == 4
    root = tree.root(NS)
    kinds = [tree.run_marks.find(root, tokens(i, i, i, 0), 0) for i in (1, 2, 3)]
    assert [ghost and ghost.kind for ghost in kinds] == [GhostKind.ONCE, GhostKind.CLEARED, None]


def test_what_was_cleared_is_no_use_when_it_comes_back() -> None:
    tree = make()
    tree.cut(put(tree, tree.root(NS), tokens(1, 1), 1), 1, is_cleared=True)
    assert tree.run_marks.take(tree.root(NS), tokens(1, 1), 0, 2 * 4) == 0


def test_prompts_that_part_inside_an_evicted_run_are_told_apart() -> None:
    """Marks stand at multiples of a stride, wherever the run was cut."""
    stride, tree = STRIDE_PAGES, make(ghost_limit=5 * STRIDE_PAGES)
    root = tree.root(NS)
    num_tokens = 3 * stride * PAGE
    prompt = tokens(*range(num_tokens))
    other = tokens(*range(stride * PAGE), *range(num_tokens, num_tokens + 2 * stride * PAGE))
    leaf = put(tree, root, prompt, 1)
    for count in (3, stride + 10, 2 * stride - 13):
        tree.cut(leaf, count)
    root = tree.root(NS)
    assert tree.ghosts.num_pages == 3 * stride
    marked = [page for page in range(3 * stride) if tree.run_marks.find(root, prompt, page)]
    assert marked == [0, stride, 2 * stride - 13, 2 * stride, 3 * stride - 3]
    assert tree.run_marks.take(root, other, 0, len(other)) == stride
    assert tree.ghosts.num_pages == 2 * stride


@python_only
def test_only_the_pages_that_come_back_count_as_returned() -> None:
    """A shorter prompt: its last mark stands for more pages than it has."""

    class Returns(Lru):
        """Keeps how many pages of ghosts came back."""

        def __init__(self) -> None:
            super().__init__()
            self.num_pages: list[int] = []

        def returned(self, ghost: Ghost, num_pages: int) -> None:
            self.num_pages.append(num_pages)

    policy, run = Returns(), STRIDE_PAGES + 40
    tree = RadixTree(PAGE, 1, policy, GhostTable(10 * run, 10_000))
    prompt = tokens(*range(run * PAGE))
    tree.cut(put(tree, tree.root(NS), prompt, 1), run)
    back = STRIDE_PAGES + 3
    assert tree.run_marks.take(tree.root(NS), prompt, 0, back * PAGE * 4) == back
    assert policy.num_pages == [STRIDE_PAGES, 3]


def test_what_was_two_nodes_comes_back_as_two() -> None:
    tree = make()
    trunk = put(tree, tree.root(NS), tokens(1, 1, 2, 2, 3, 3), 1)
    leaf = put(tree, trunk, tokens(4, 4, 5, 5), 4)
    prompt = tokens(1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    for node, count in ((leaf, 1), (leaf, 1), (trunk, 2), (trunk, 1)):
        tree.cut(node, count)
    root = tree.root(NS)
    assert tree.run_marks.take(root, prompt, 0, len(prompt)) == 3
    trunk = put(tree, root, prompt[: 3 * PAGE * 4], 1)
    assert tree.run_marks.take(trunk, prompt, 3 * PAGE * 4, len(prompt)) == 2


def test_a_parent_that_becomes_a_leaf_ranks_as_just_used() -> None:
    tree = make()
    trunk = put(tree, tree.root(NS), tokens(1, 2), 1)
    leaf = put(tree, trunk, tokens(3, 4), 2)
    other = put(tree, tree.root(NS), tokens(5, 6), 3)
    assert list(tree.policy.order()) == [leaf, other]
    tree.cut(leaf, 1)
    assert list(tree.policy.order()) == [other, trunk]


def test_held_without_use_keeps_its_place() -> None:
    tree = make()
    one, two, three = (put(tree, tree.root(NS), tokens(i, i), i) for i in (1, 2, 3))
    tree.pin_for_ticket(one)
    assert tree.policy.victim() is two, "what is copied is no victim"
    assert tree.evictable_pages == 2
    tree.unpin_for_ticket(one)
    assert list(tree.policy.order()) == [one, two, three] and tree.policy.victim() is one
    tree.pin_for_ticket(one)
    tree.pin(one)
    assert list(tree.policy.order()) == [two, three]
    tree.unpin(one)  # a use while it is held otherwise
    tree.unpin_for_ticket(one)
    assert list(tree.policy.order()) == [two, three, one]
    assert tree.evictable_pages == 3


def test_a_ticket_on_a_trunk_holds_the_path_only() -> None:
    tree = make()
    trunk = put(tree, tree.root(NS), tokens(1, 2), 1)
    leaf = put(tree, trunk, tokens(3, 4), 2)
    tree.pin_for_ticket(trunk)
    assert tree.policy.victim() is leaf and tree.evictable_pages == 1
    tree.cut(leaf, 1)
    assert list(tree.policy.order()) == [trunk] and tree.evictable_pages == 0
    tree.unpin_for_ticket(trunk)
    assert tree.policy.victim() is trunk and tree.evictable_pages == 1


def test_growth_in_place_costs_no_node() -> None:
    tree = make()
    leaf = put(tree, tree.root(NS), tokens(1, 2), 1)
    tree.pin(leaf)
    for i in range(5):
        tree.grow(leaf, tokens(i, i), [bytearray(pack([10 + i]))], 1)
    assert tree.num_nodes == 1 and unpack(leaf.pages[0]) == [1, 10, 11, 12, 13, 14] and leaf.end == 6


@pytest.mark.parametrize("num_pages", [1, 3, 4, 5, 12, 13, 300, 700])
def test_every_divergence_is_found(num_pages: int) -> None:
    tree = make()
    run = array("i", range(num_pages * PAGE))
    leaf = put(tree, tree.root(NS), run.tobytes(), 1)
    for at in {*range(min(num_pages * PAGE, 30)), *range(0, num_pages * PAGE, 37), num_pages * PAGE - 1}:
        other = array("i", run)
        other[at] = -1
        prompt = other.tobytes()
        walk = tree.walk(tree.root(NS), prompt, 0, len(prompt))
        assert walk.end == at // PAGE
        assert walk.child is (leaf if at >= PAGE else None)


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=10), min_size=1, max_size=8))
def test_walk_finds_the_longest_common_prefix(prompts: list[list[int]]) -> None:
    """Published one after another by walking, splitting and attaching."""
    tree, seen, next_id = make(), [], 1
    for prompt in prompts:
        whole = prompt[: len(prompt) // PAGE * PAGE]
        packed = tokens(*whole)
        walk = tree.walk(tree.root(NS), packed, 0, len(packed))
        common = max((prefix(whole, other) for other in seen), default=0)
        assert walk.end == common
        node = tree.split(walk.child, walk.pages) if walk.child is not None else walk.node
        if rest := packed[common * PAGE * 4 :]:
            put(tree, node, rest, next_id)
        next_id += len(whole)
        seen.append(whole)
    assert sum(node.resident for root in tree.roots.values() for node in below(root)) == tree.evictable_pages


def prefix(one: list[int], two: list[int]) -> int:
    pages = 0
    while one[: (pages + 1) * PAGE] == two[: (pages + 1) * PAGE] and (pages + 1) * PAGE <= min(len(one), len(two)):
        pages += 1
    return pages


def below(node: Node) -> list[Node]:
    nodes = list(node.children.values())
    for child in nodes:
        nodes.extend(child.children.values())
    return nodes


def test_slru_counts_out_what_a_cut_takes() -> None:
    """Two protected leaves fill the share; once one is cut away whole, another fits without a demotion."""
    tree = RadixTree(PAGE, 1, SegmentedLru(5), GhostTable(100, 100))  # protects four pages
    leaves = [put(tree, tree.root(NS), tokens(n, n, n, n), 2 * n) for n in (1, 2, 3)]
    for leaf in leaves:
        tree.pin(leaf)
        leaf.uses = 1
    tree.unpin(leaves[0])
    tree.unpin(leaves[1])
    tree.cut(leaves[0], 2)
    tree.unpin(leaves[2])
    assert [leaf.uses for leaf in leaves[1:]] == [1, 1]
