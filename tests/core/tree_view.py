"""What stands in a worker's tree: for each group, prefix -> page id. The only test code that looks inside."""

from __future__ import annotations

from array import array

from cache_service.core.cache_manager import CacheManager
from session.words import Namespace, WorkerId
from tests.core.shadow import Shadow, marks_of, state_value

Path = tuple[Namespace, tuple[int, ...]]


def standing(manager: CacheManager, worker_id: WorkerId, num_groups: int) -> list[dict[Path, int]]:
    """Every findable page of every group."""
    view: list[dict[Path, int]] = [{} for _ in range(num_groups)]
    tree = manager.workers[worker_id].cache.tree
    size = tree.page_key_bytes
    for namespace, root in tree.roots.items():
        stack = [(child, b"") for child in root.children.values()]
        while stack:
            node, before = stack.pop()
            for at in range(node.resident):
                prefix = tuple(array("i", before + bytes(node.key[: (at + 1) * size])))
                for group in range(num_groups):
                    page = int.from_bytes(node.pages[group][at * 4 : at * 4 + 4], "little")
                    if page:
                        view[group][namespace, prefix] = page
            stack += [(child, before + bytes(node.key)) for child in node.children.values()]
    return view


def node_ends(manager: CacheManager, worker_id: WorkerId) -> set[Path]:
    """The prefixes at which a node ends: where the last page behind one is evicted, the node is a leaf from now on."""
    tree = manager.workers[worker_id].cache.tree
    ends: set[Path] = set()
    for namespace, root in tree.roots.items():
        stack = [(child, bytes(child.key)) for child in root.children.values()]
        while stack:
            node, prefix = stack.pop()
            ends.add((namespace, tuple(array("i", prefix))))
            stack += [(child, prefix + bytes(child.key)) for child in node.children.values()]
    return ends


def check_contents(view: list[dict[Path, int]], shadow: Shadow, state_groups: set[int]) -> None:
    """Every findable page holds exactly its prefix: the law that no answer ever changes by a reuse."""
    size = shadow.page_tokens
    for group, pages in enumerate(view):
        for (namespace, prefix), page in pages.items():
            marks = marks_of(namespace, prefix)
            true = state_value(marks, len(marks)) if group in state_groups else tuple(marks[-size:])
            assert shadow.value(group, page) == true, f"group {group} page {page} does not hold its prefix"
