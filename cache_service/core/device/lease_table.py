"""What each live sequence of one worker holds and reads. Frees nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cache_service.core.base.page_hash import PromptHashes
from cache_service.core.device.radix_node import Node
from cache_service.core.device.transfer_table import Fetch
from session.limits import MAX_SNAPSHOT_BOUNDARIES
from session.words import TOKEN_BYTES, Namespace, SequenceId, TicketId

# Running sequences may grow to this multiple of the limit on bytes of tokens at which new ones wait.
GROWTH = 2


class Arrival(NamedTuple):
    """One acknowledged fetch: its leading `num_done` pages hold their KV."""

    fetch: Fetch
    num_done: int


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence. `node` is the deepest node that it pins; `published_pages` pages lie at or before it."""

    sequence_id: SequenceId
    namespace: Namespace
    prompt: bytes
    node: Node
    published_pages: int
    full_end: int  # the page number behind the last page of groups without holes, which go in step
    holds: list[Any]  # by group number: its pages, as the class of its kind keeps them
    priority: int = 0
    chunk_tokens: int = 0
    bypass: bool = False  # reuses nothing and publishes nothing: all that it holds is its own
    computed_tokens: int = 0
    # The page boundaries at which it started and up to which KV was found.
    resumed_pages: int = 0
    matched_pages: int = 0
    room_tokens: int = 0  # up to which snapshot boundaries have been offered
    leave_at: frozenset[int] = frozenset()  # page boundaries at which others are known to part from it
    accepted: bytearray = field(default_factory=bytearray)  # tokens beyond the prompt
    fetches: frozenset[TicketId] = frozenset()  # waits for the acks of these tickets
    arrived: tuple[Arrival, ...] = ()  # what the acks said so far
    may_fetch: bool = True  # no ticket of this round failed
    hashes: PromptHashes | None = None  # of the prompt, for the plan after a fetch
    device_tokens: int = 0  # usable on the device when first acquired, for a lease that fetches
    fetched_any: bool = False  # what is usable beyond that came from the host tier

    @property
    def num_tokens(self) -> int:
        return (len(self.prompt) + len(self.accepted)) // TOKEN_BYTES

    def resume_boundaries(self, page_tokens: int, branch: int) -> tuple[int, int, int]:
        """Page boundaries at which later prompts are likely to resume: what they need there is worth keeping.

        They are the last boundary at which this very prompt could resume, the end of its whole pages, and `branch`,
        where it parted from what was cached. For snapshots that is `matched_pages`, where KV was found but perhaps no
        snapshot; there is one at `resumed_pages` already. For windows it is `resumed_pages`: pages before it were hit.
        """
        num_tokens = len(self.prompt) // TOKEN_BYTES
        return (num_tokens - 1) // page_tokens, branch, num_tokens // page_tokens

    def want(self, boundaries_tokens: tuple[int, ...], page_tokens: int) -> None:
        """Notes where other requests part from it.

        Boundaries that its launches have passed are dropped, so that no more are kept than can be named at once."""
        ahead = {tokens // page_tokens for tokens in boundaries_tokens if tokens > self.computed_tokens}
        ahead.update(boundary for boundary in self.leave_at if boundary * page_tokens > self.computed_tokens)
        self.leave_at = frozenset(sorted(ahead)[:MAX_SNAPSHOT_BOUNDARIES])

    def tokens(self, start: int, end: int) -> bytes:
        """Packed tokens between two byte offsets."""
        head = len(self.prompt)
        if end <= head:
            return self.prompt[start:end]
        if start >= head:
            return bytes(self.accepted[start - head : end - head])
        return self.prompt[start:] + self.accepted[: end - head]


@dataclass(slots=True)
class TokenBytes:
    """Bytes of tokens that the leases of all workers hold."""

    num_bytes: int = 0


class LeaseTable(dict[SequenceId, Lease]):
    """Leases by sequence id, in the order in which they were granted."""

    def __init__(self, total: TokenBytes) -> None:
        super().__init__()
        self.num_bytes = 0
        """Of tokens that the leases hold."""
        self.total = total
        """The same of all workers' leases, these included."""

    def add(self, lease: Lease) -> None:
        self[lease.sequence_id] = lease
        self._count(len(lease.prompt) + len(lease.accepted))

    def remove(self, sequence_id: SequenceId) -> None:
        lease = self.pop(sequence_id)
        self._count(-len(lease.prompt) - len(lease.accepted))

    def accept(self, lease: Lease, tokens: bytes) -> None:
        """Appends generated tokens, and counts them."""
        lease.accepted += tokens
        self._count(len(tokens))

    def forget(self) -> None:
        """Drops all leases, with the worker's state."""
        self.clear()
        self._count(-self.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.total.num_bytes += num_bytes

    def all(self) -> list[Lease]:
        return list(self.values())

    def in_scope(self, namespace: Namespace | None) -> bool:
        return any(namespace in (None, lease.namespace) for lease in self.values())
