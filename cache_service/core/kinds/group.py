"""What a kind of group means, from where a sequence can resume to what an adopt claims: one class for each kind.

A new kind is a file in this folder and a line in `KINDS` (registry.py). The verbs call these methods, in the order of a
request's life, and never ask which kind it is. Residency is packed in prompt order: a byte for each page, 0 for a hole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from cache_service.core.base.stats import GroupStats
from cache_service.core.device.lease_table import Lease
from cache_service.core.device.page_pool import PagePool, unpack
from cache_service.core.device.radix_node import Node, Packed
from session.messages import Acquire, Adopt, Grant
from session.words import PAGE_ID_BYTES, GroupPages, GroupSpec, MissReason, StateSlot, Transfer


class Group(ABC):
    """One group of one worker. Boundaries and pages are page numbers, unless their names say tokens.

    What a plan needs of the group, what a lease holds of it (`lease.holds[number]`) and what an adopt claims have types
    of the kind's own, which are read there alone. `num_pages` counts the pages from a path's end to a plan's: those
    that a group without holes takes.
    """

    has_table: ClassVar[bool] = True
    """Whether a sequence has a block table of it; a working slot otherwise."""

    miss_reason: ClassVar[MissReason]
    """Why tokens miss where this group alone cannot resume."""

    unit: ClassVar[str] = "pages"
    """What a refusal says is lacking."""

    def __init__(self, number: int, spec: GroupSpec, page_tokens: int, pool: PagePool) -> None:
        self.number, self.spec, self.page_tokens, self.pool = number, spec, page_tokens, pool
        self.limited_tokens = 0  # of admitted requests: matched, and not used since this group could not resume later

    # Where a sequence can resume.

    @abstractmethod
    def resume(self, resident: bytes, limit: int) -> int:
        """Returns the largest boundary, at most `limit`, at which this group alone can resume."""

    @abstractmethod
    def reach_pages(self) -> int:
        """Returns how many whole pages before a boundary, away from the start, resuming there may read."""

    @abstractmethod
    def fetch_bytes(self, matched: int, boundary: int) -> int:
        """Returns at most how many bytes a fetch brings so that this group can resume at `boundary`."""

    def never_fits(self, num_tokens: int, chunk_tokens: int, reserve_pages: int) -> str | None:
        """Returns why a prompt cannot run on an empty worker either; `chunk_tokens`: those of its first launch."""
        return None

    # Acquire: a plan asks the first three, its commit calls the others.

    def need(self, page_ids: bytes, boundary: int, acquire: Acquire) -> Any:
        """Returns what to take so that the sequence can start at `boundary`; `page_ids`: those of the path."""
        return None

    @abstractmethod
    def lacks(self, needs: dict[int, Any], num_pages: int) -> bool:
        """Returns whether there are too few pages for the needs.

        A group without holes must have `num_pages` free ones: what the plan takes beyond what can be evicted.
        """

    def never_holds(self, need: Any) -> bool:
        """Returns whether the need is more than the whole pool."""
        return False

    @abstractmethod
    def take(self, lease: Lease, needs: dict[int, Any], num_pages: int) -> None:
        """Reads what is reused and takes the rest, as the lease's hold."""

    @abstractmethod
    def targets(self, lease: Lease, needs: dict[int, Any], boundary: int) -> GroupPages:
        """Returns the pages before `boundary` that a fetch is to fill, with holes where nothing is lacking."""

    def admit(self, lease: Lease) -> None:
        """Notes that the sequence may run, with nothing left to fetch."""

    def offer(self, lease: Lease, room_tokens: int) -> Sequence[StateSlot]:
        """Returns slots for the boundaries in (lease.room_tokens, room_tokens], as many as there are."""
        return ()

    def table(self, lease: Lease) -> GroupPages | None:
        """Returns the block table from page 0 on."""
        return None

    def describe(self, grant: Grant, lease: Lease) -> Grant:
        """Returns the grant with what else is to be said of the lease's hold."""
        return grant

    # Extend.

    def more(self, lease: Lease, total: int) -> Any:
        """Returns the need of a length of `total` pages."""
        return None

    def never_extends(self, lease: Lease, total: int) -> str | None:
        """Returns why the sequence could not grow to `total` pages on an empty worker either."""
        return None

    def extend(self, lease: Lease, needs: dict[int, Any], num_pages: int) -> GroupPages | None:
        """Takes the need. Returns the pages that are added to the block table."""
        return None

    def shrink(self, lease: Lease, total: int) -> None:
        """Gives back the pages behind a length of `total` pages: nothing was computed in them."""

    # Publish.

    def end(self, lease: Lease) -> int | None:
        """Returns the page number behind the last one that a launch may have computed; None where any may be."""
        return None

    def give_to_node(self, lease: Lease, count: int) -> bytearray:
        """Returns the group's pages of a new run of `count` pages; holes, for pages that are merged one by one."""
        return bytearray(count * PAGE_ID_BYTES)

    def merge(self, lease: Lease, node: Node, first: int, end: int, remaps: list[GroupPages]) -> None:
        """Merges the lease's pages first .. end - 1 into `node`: both have the same pages afterwards."""

    def publish(self, lease: Lease) -> Sequence[Node]:
        """After a launch, whose whole pages are in the tree: give it what else it made findable, let go of what no
        later launch reads. Returns the nodes that hold more now."""
        return ()

    def finish(self, lease: Lease, boundary: int) -> Sequence[Node]:
        """Publishes at the end of the sequence, whose last whole page ends at `boundary`; returns as `publish`."""
        return ()

    def arrive(self, lease: Lease, page_ids: bytes, first: int, end: int) -> Sequence[Node]:
        """A fetch brought these pages; those before `end` become findable, whose nodes are in the tree. Returns what
        `publish` returns."""
        return ()

    # What is held.

    @abstractmethod
    def held(self, lease: Lease) -> Packed:
        """Returns the pages that the lease holds or reads, in no order."""

    def drop(self, page_ids: Packed) -> None:
        """Gives held pages back; unpublished ones are freed."""
        self.pool.give(page_ids)

    def begin_copy(self, page_ids: bytes) -> None:
        """Keeps these pages of a pinned node while a spill copies them."""

    def end_copy(self, page_ids: bytes) -> None:
        """The spill has ended. A copy does not count as a use: pages keep their place in the eviction order."""

    def num_copied(self, transfer: Transfer) -> int:
        """Returns how many pages a spill keeps from eviction."""
        return transfer.num_pages

    def stats(self, evictable: int, evicted: int) -> GroupStats:
        """`evictable` and `evicted` count pages of whole nodes."""
        spec = self.spec
        return GroupStats(spec.name, spec.kind, spec.num_pages, self.pool.num_free, evictable, evicted)

    # Adopt.

    @abstractmethod
    def claim(self, adopt: Adopt, standing: bytes) -> Any:
        """Returns what an adopt is to take, or a str that says what of it is taken already.

        `standing` are the tree's pages of the path. Raises InvalidInput.
        """

    @abstractmethod
    def adopt(self, lease: Lease, claim: Any) -> None:
        """Takes what was claimed, as the lease's hold."""

    # Restore: pages that a worker's inventory says hold the KV of a run.

    def cannot_restore(self, page_ids: bytes, num_standing: int) -> str | None:
        """Returns which page is taken without which there is no run; its first `num_standing` pages are in the tree.

        Raises InvalidInput for a hole where the group has none.
        """
        return None

    def restored(self, page_ids: bytes) -> bytearray:
        """Returns the group's pages of a new node; holes, for pages that `fill` puts in one by one."""
        return bytearray(len(page_ids))

    def fill(self, node: Node, first: int, page_ids: bytes) -> None:
        """Where the path down to `node` lacks pages from page number `first` on, it takes those of these that are free.

        Nobody reads them."""

    # For the kinds.

    def _table_of(self, adopt: Adopt) -> GroupPages:
        return next(table for table in adopt.tables if table.group == self.number)

    def _taken(self, page_ids: Iterable[int], unit: str = "page") -> str | None:
        """Returns which of the pages is not free, or named before."""
        seen: set[int] = set()
        for page_id in page_ids:
            if page_id in seen or not self.pool.is_free(page_id):
                return f"{unit} {page_id} of group {self.spec.name} is taken"
            seen.add(page_id)
        return None

    def _never_at_once(self, num_pages: int) -> str | None:
        if num_pages <= self.spec.num_pages:
            return None
        return f"{num_pages} pages at once; group {self.spec.name} has {self.spec.num_pages}"


def pages_of(num_tokens: int, page_tokens: int) -> int:
    """Returns how many pages of `page_tokens` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)


def present(page_ids: bytes) -> list[int]:
    """Returns the packed page ids without the holes."""
    return [page_id for page_id in unpack(page_ids) if page_id]


def residency(page_ids: bytes | bytearray) -> bytes:
    """Returns one byte for each packed page id: 1 where the page is resident."""
    ids = array("I")
    ids.frombytes(page_ids)
    return bytes(map(bool, ids))


def resume(groups: Sequence[Group], resident: Sequence[bytes], limit: int) -> int:
    """Returns the largest boundary at which every group can resume: sweeps until no group lowers it any more."""
    boundary = limit
    while True:
        before = boundary
        for group, flags in zip(groups, resident, strict=True):
            boundary = group.resume(flags, boundary)
        if boundary == before:
            return boundary


def limiting_group(groups: Sequence[Group], resident: Sequence[bytes], limit: int) -> Group | None:
    """Returns the first group that cannot resume at `limit` itself."""
    pairs = zip(groups, resident, strict=True)
    return next((group for group, flags in pairs if group.resume(flags, limit) < limit), None)
