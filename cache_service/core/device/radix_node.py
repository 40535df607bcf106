"""One run of pages on one path, and the root of a namespace. Values only: the tree keeps their counts and shape."""

from __future__ import annotations

from collections import OrderedDict

from cache_service.core.base.page_hash import namespace_digest
from session.words import PAGE_ID_BYTES, Namespace, PageId

Packed = bytes | bytearray
Queue = OrderedDict["Node", None]


class Node:
    """One run; `start` is the page number of its first page.

    One object: two more, for recency and host copies, take 80 bytes a node (measured), which are 5 of the 183 bytes
    that a page takes in runs of 16.
    """

    __slots__ = (
        "children",
        "hashes",
        "key",
        "pages",
        "parent",
        "pins",
        "priority",
        "queue",
        "queued_at",
        "renewed_ms",
        "resident",
        "root",
        "soft_until_ms",
        "spilled",
        "start",
        "ticket_pins",
        "used_at",
        "used_ms",
        "uses",
    )

    def __init__(self, parent: Node | None, start: int, key: Packed, pages: list[bytearray], resident: int) -> None:
        # Structure.
        self.parent = parent
        self.root: Root = parent.root if parent is not None else self  # type: ignore[assignment]
        self.start, self.key, self.pages, self.resident = start, key, pages, resident
        self.children: dict[bytes, Node] = {}
        # Pins; `ticket_pins` of them belong to spill tickets, which forbid neither growth nor a place in the order.
        self.pins = self.ticket_pins = 0
        # Recency, for the eviction policy; `queued_at` and `used_at` are on its clock.
        self.queue: Queue | None = None  # while no lease holds it and it has no child
        self.queued_at = self.used_at = self.uses = self.priority = self.soft_until_ms = 0
        self.used_ms = 0  # when the last lease let go of it, or of a node behind it
        # Host copies: leading pages that need no look at the host tier any more; when they were last renewed there.
        self.spilled = self.renewed_ms = 0
        # Page hashes of leading resident pages, for events and the host tier.
        self.hashes = bytearray()

    @property
    def end(self) -> int:
        """The page number behind the last page."""
        return self.start + self.resident

    def holder(self, page: int) -> Node:
        """Returns the node of the path down to this one that holds the page number: this one, or an ancestor."""
        node = self
        while node.start > page:
            assert node.parent is not None
            node = node.parent
        return node

    def page_id(self, group: int, page: int) -> PageId:
        """Returns the group's page at a page number of this node; NO_PAGE at a hole."""
        at = (page - self.start) * PAGE_ID_BYTES
        return PageId(int.from_bytes(self.pages[group][at : at + PAGE_ID_BYTES], "little"))

    def set_page_id(self, group: int, page: int, page_id: int) -> None:
        """Sets the group's page at a page number of this node; NO_PAGE makes a hole."""
        at = (page - self.start) * PAGE_ID_BYTES
        self.pages[group][at : at + PAGE_ID_BYTES] = page_id.to_bytes(PAGE_ID_BYTES, "little")


class Root(Node):
    """The start of every prompt of one namespace. Pinned permanently; holds no pages."""

    __slots__ = ("digest", "namespace")

    def __init__(self, namespace: Namespace, num_groups: int) -> None:
        super().__init__(None, 0, b"", [bytearray() for _ in range(num_groups)], 0)
        self.namespace = namespace
        self.digest = namespace_digest(namespace)
        self.pins = 1
