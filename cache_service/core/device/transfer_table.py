"""Open spill and fetch tickets of one worker: what moves, and what a ticket holds until its ack. Frees nothing itself.

fetch   holds nothing while its lease lives; when the lease ends first, the ticket takes over its transfer's pages
spill   pins the node, and reads each page that it copies of groups with holes
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from cache_service.core.device.radix_node import Node
from cache_service.core.host.hash_index import HostView
from session.words import HASH_BYTES, PageHash, SequenceId, TicketId, Transfer

MAX_RUNS = 1024


@dataclass(slots=True)
class Fetch:
    """A run of pages for one sequence."""

    transfer: Transfer
    sequence_id: SequenceId
    host: HostView  # when the ticket was opened; a later Hello may name another tier
    opened_ms: int
    orphaned: bool = False

    def hashes(self, count: int) -> list[bytes]:
        """Returns the packed hashes of the first `count` pages."""
        packed = self.transfer.groups[0].page_hashes
        return [packed[at : at + HASH_BYTES] for at in range(0, count * HASH_BYTES, HASH_BYTES)]


@dataclass(slots=True)
class SpillRow:
    """One page of a spill: its hash and the groups that are copied, as a bit mask."""

    page_hash: PageHash
    groups: int


@dataclass(slots=True)
class Spill:
    """Pages of one node; they are held until the ack. A row is None where nothing of that page moves."""

    transfer: Transfer
    node: Node
    rows: tuple[SpillRow | None, ...]
    opened_ms: int


@dataclass(slots=True)
class TicketIds:
    """Counts tickets of all workers, so that a closed ticket is told from one never issued."""

    last: int = 0


class _Issued:
    """Which ticket ids went to one worker, as runs; a worker that moves pages alone has a single one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, ticket: int) -> None:
        if self._ends and self._ends[-1] + 1 == ticket:
            self._ends[-1] = ticket
            return
        self._starts.append(ticket)
        self._ends.append(ticket)
        if len(self._starts) > MAX_RUNS:
            # Acks of tickets this old are long past; merging makes them count as issued.
            self._starts[0:2], self._ends[0:2] = [self._starts[0]], [self._ends[1]]

    def __contains__(self, ticket: int) -> bool:
        at = bisect_right(self._starts, ticket) - 1
        return at >= 0 and ticket <= self._ends[at]


class TransferTable:
    """Tickets of one worker; ids come from a counter that all workers share."""

    def __init__(self, ids: TicketIds) -> None:
        self._ids = ids
        self.fetches: dict[TicketId, Fetch] = {}
        self.late: set[TicketId] = set()  # of the fetches: open for too long, so they count against no limit
        self.spills: dict[TicketId, Spill] = {}
        self.abandoned: dict[TicketId, Spill] = {}  # hold nothing; their rows stay on the way until the late ack
        self._issued = _Issued()
        self.fetched_ms = 0  # when a fetch was opened last; before the first one, when rates were first told

    def __len__(self) -> int:
        return len(self.fetches) + len(self.spills)

    @property
    def num_fetching(self) -> int:
        """Returns the number of fetches that count against `max_open_tickets`."""
        return len(self.fetches) - len(self.late)

    def new_id(self) -> TicketId:
        self._ids.last += 1
        self._issued.add(self._ids.last)
        return TicketId(self._ids.last)

    def find(self, ticket: TicketId) -> Transfer | None:
        """Returns the transfer of an open ticket."""
        held = self.fetches.get(ticket) or self.spills.get(ticket)
        return held.transfer if held is not None else None

    def was_issued(self, ticket: TicketId) -> bool:
        """Returns whether the ticket was issued to this worker, open or closed."""
        return ticket in self._issued
