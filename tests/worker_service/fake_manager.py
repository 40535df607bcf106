"""A cache manager small enough to be obviously right: counts pages, readers and leases, and answers steps.

It refuses what its limits exclude, and raises on whatever else a real manager would refuse as invalid. `host` (a dict
of page contents by key) makes it spill every published page and grant fetches.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from session.limits import SessionLimits
from session.messages import (
    Ack,
    Acquire,
    Adopt,
    Extend,
    ExtendGrant,
    Grant,
    Publish,
    Refusal,
    Release,
    Remap,
    Step,
    StepReply,
    Welcome,
)
from session.words import (
    GroupKind,
    GroupPages,
    GroupSpec,
    Match,
    Namespace,
    RefusalReason,
    ReleaseReason,
    SequenceId,
    TicketId,
    Transfer,
    TransferPages,
    TransferStatus,
)

LIMITS = SessionLimits(
    max_sequence_tokens=1 << 20,
    max_live_sequences=4096,
    max_step_items=8192,
    max_message_bytes=64 << 20,
    max_name_chars=256,
    max_adopt_pages=4096,
    max_kept_bytes=1 << 20,
    grace_ms=1000,
)

Key = tuple[Namespace, bytes]


def pack(page_ids: list[int]) -> bytes:
    return array("I", page_ids).tobytes()


@dataclass
class Lease:
    namespace: Namespace
    tokens: bytes
    start: int
    computed: int
    published_pages: int
    tables: list[list[int]]
    reads: list[set[int]]  # for each group the page numbers that this lease pins
    asked: Acquire | None = None
    bypasses: bool = False
    ticket: TicketId | None = None


@dataclass
class Ticket:
    sequence_id: SequenceId
    first: int
    keys: list[Key]
    pages: list[list[int]]  # for each group
    is_orphan: bool = False


@dataclass
class FakeManager:
    groups: tuple[GroupSpec, ...]
    page_tokens: int
    host: dict[Key, list[object]] | None = None
    spill: Callable[[int, int], object] = lambda group, page: None
    epoch: str = "epoch-1"
    limits: SessionLimits = LIMITS
    generation: int = 0
    leases: dict[SequenceId, Lease] = field(default_factory=dict)
    tickets: dict[TicketId, Ticket] = field(default_factory=dict)
    last_step_id: int = 0
    num_acquires: dict[SequenceId, int] = field(default_factory=dict)
    order: list[SequenceId] = field(default_factory=list)  # who was granted, in the order of first grants
    num_refusals: int = 0
    sent_bytes: int = 0  # of prompts
    adopted: list[SequenceId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A new state: every page is free, nothing is known."""
        self.leases.clear()
        self.tickets.clear()
        self.last_step_id = 0
        self.kept: dict[SequenceId, bytes] = {}  # oldest first
        self.dropped: set[SequenceId] = set()  # of the kept ones, for want of room
        self.cached: dict[Key, list[int]] = {}  # oldest first; a page id for each group, 0 where there is none
        self.readers: list[dict[int, int]] = [{} for _ in self.groups]
        self.free = [list(range(group.num_pages, 0, -1)) for group in self.groups]
        self.reply = StepReply(0)
        self._no_room = False

    # -- the dialogue --

    def hello(self, generation: int) -> Welcome:
        if generation == 0 or generation != self.generation:
            self.forget()
            self.generation += 1
        return Welcome(self.epoch, self.generation, self.last_step_id, self.limits)

    def step(self, step: Step) -> StepReply:
        if step.step_id == self.last_step_id:
            return self.reply
        assert step.step_id == self.last_step_id + 1, "steps are counted"
        self._no_room = False
        self.grants: list[Grant] = []
        self.refusals: list[Refusal] = []
        most = self.limits.max_step_items
        assert all(len(items) <= most for items in step if isinstance(items, tuple)), "too many items"
        assert not step.adopts or not any((step.acks, step.publishes, step.releases, step.extends, step.acquires))
        for ack in step.acks:
            self.ack(ack)
        remaps = [remap for publish in step.publishes if (remap := self.publish(publish))]
        for release in step.releases:
            self.release(release)
        for adopt in step.adopts:
            self.adopt(adopt)
        extends = [grant for extend in step.extends if (grant := self.extend(extend))]
        for acquire in step.acquires:
            self.take_prompt(acquire)
        self.last_step_id = step.step_id
        self.reply = StepReply(step.step_id, tuple(self.grants), tuple(extends), tuple(self.refusals), tuple(remaps))
        return self.reply

    def refuse(self, sequence_id: SequenceId, reason: RefusalReason = RefusalReason.NO_ROOM, field: str = "") -> None:
        self._no_room |= reason is RefusalReason.NO_ROOM
        self.num_refusals += 1
        self.refusals.append(Refusal(sequence_id, reason, "does not fit", field))

    def is_invalid(self, namespace: Namespace, tokens: bytes) -> bool:
        return len(namespace.salt) > self.limits.max_name_chars or len(tokens) // 4 > self.limits.max_sequence_tokens

    def take_prompt(self, asked: Acquire) -> None:
        """The tokens as a whole, or a refusal; what is refused for want of room is kept."""
        self.sent_bytes += len(asked.tokens)
        kept = self.kept.pop(asked.sequence_id, b"")
        if len(kept) < asked.kept_tokens * 4:
            self.refuse(asked.sequence_id, RefusalReason.RESEND)
            return
        whole = asked._replace(tokens=kept[: asked.kept_tokens * 4] + asked.tokens, kept_tokens=0)
        if self.is_invalid(asked.namespace, whole.tokens):
            self.refuse(asked.sequence_id, RefusalReason.INVALID, "step.acquires[0].tokens")
            return
        self.acquire(whole)
        if self.refusals and self.refusals[-1][:2] == (asked.sequence_id, RefusalReason.NO_ROOM):
            self.keep(asked.sequence_id, whole.tokens)

    def keep(self, sequence_id: SequenceId, tokens: bytes) -> None:
        self.kept[sequence_id] = tokens
        while sum(map(len, self.kept.values())) > self.limits.max_kept_bytes:
            oldest = next(iter(self.kept))
            del self.kept[oldest]
            self.dropped.add(oldest)

    # -- pages --

    def is_window(self, group: int) -> bool:
        return self.groups[group].kind is GroupKind.WINDOW

    def evictable(self, group: int, but: set[int]) -> list[int]:
        """Longest prefixes first, so that a cached page never loses the one before it."""
        entries = sorted(self.cached.items(), key=lambda entry: -len(entry[0][1]))
        pages = [pages[group] for _, pages in entries if pages[group]]
        return [page for page in pages if not self.readers[group].get(page) and page not in but]

    def room(self, group: int, hits: set[int]) -> int:
        return len(self.free[group]) + len(self.evictable(group, hits))

    def take(self, group: int, count: int) -> list[int]:
        while len(self.free[group]) < count:
            victim = self.evictable(group, set())[0]
            for key, pages in list(self.cached.items()):
                if pages[group] == victim:
                    pages[group] = 0
                    if not any(pages):
                        del self.cached[key]
            self.free[group].append(victim)
        return [self.free[group].pop() for _ in range(count)]

    def read(self, lease: Lease, group: int, number: int) -> None:
        page = lease.tables[group][number]
        lease.reads[group].add(number)
        self.readers[group][page] = self.readers[group].get(page, 0) + 1

    def unread(self, lease: Lease, group: int, number: int) -> None:
        page = lease.tables[group][number]
        lease.reads[group].remove(number)
        self.readers[group][page] -= 1
        assert self.readers[group][page] >= 0
        if not self.readers[group][page] and not any(pages[group] == page for pages in self.cached.values()):
            self.free[group].append(page)

    def key(self, namespace: Namespace, tokens: bytes, number: int) -> Key:
        return namespace, tokens[: (number + 1) * self.page_tokens * 4]

    def usable(self, namespace: Namespace, tokens: bytes) -> int:
        """Pages at which every group can resume."""
        most = (len(tokens) // 4 - 1) // self.page_tokens
        cached = [self.cached.get(self.key(namespace, tokens, n)) or [0] * len(self.groups) for n in range(most)]
        for boundary in range(most, 0, -1):
            if all(
                all(cached[n][g] for n in range(self.first_read(g, boundary * self.page_tokens), boundary))
                for g in range(len(self.groups))
            ):
                return boundary
        return 0

    def first_read(self, group: int, length: int) -> int:
        if not self.is_window(group):
            return 0
        return max(length - (self.groups[group].window_tokens - 1), 0) // self.page_tokens

    # -- verbs --

    def acquire(self, asked: Acquire, num_fetched: int = 0) -> None:
        """`num_fetched` pages before the end of the cached prefix came by a ticket just now."""
        sequence_id, namespace, tokens = asked.sequence_id, asked.namespace, asked.tokens
        assert sequence_id not in self.leases, "duplicate sequence"
        self.num_acquires[sequence_id] = self.num_acquires.get(sequence_id, 0) + 1
        length = len(tokens) // 4
        boundary = 0 if asked.bypass_cache else self.usable(namespace, tokens)
        brought = [] if asked.bypass_cache else self.host_pages(namespace, tokens, boundary)
        start = boundary + len(brought)
        ends = [
            -(-min(start * self.page_tokens + asked.chunk_tokens, length) // self.page_tokens)
            if self.is_window(group)
            else -(-length // self.page_tokens)
            for group in range(len(self.groups))
        ]
        hits = [
            {
                n: self.cached[self.key(namespace, tokens, n)][group]
                for n in range(self.first_read(group, boundary * self.page_tokens), boundary)
            }
            for group in range(len(self.groups))
        ]
        if any(-(-length // self.page_tokens) > spec.num_pages for spec in self.groups if spec.kind == GroupKind.FULL):
            self.refuse(sequence_id, RefusalReason.NEVER_FITS)
            return
        lacks = any(
            self.room(group, set(hits[group].values())) - (ends[group] - boundary) < asked.reserve_pages
            for group in range(len(self.groups))
        )
        if self._no_room or lacks:
            self.refuse(sequence_id)
            return
        lease = Lease(
            namespace, tokens, start, 0, boundary, [], [set() for _ in self.groups], asked, asked.bypass_cache
        )
        lease.start = lease.computed = start * self.page_tokens
        lease.published_pages = start
        for group, numbers in enumerate(hits):
            lease.tables.append([numbers.get(n, 0) for n in range(boundary)])
            for number in numbers:
                self.read(lease, group, number)
        for group in range(len(self.groups)):
            self.grow(lease, group, ends[group])
        self.leases[sequence_id] = lease
        if sequence_id not in self.order:
            self.order.append(sequence_id)
        self.grants.append(self.grant(sequence_id, lease, boundary - num_fetched, num_fetched, brought))

    def host_pages(self, namespace: Namespace, tokens: bytes, boundary: int) -> list[Key]:
        """The run of host rows after the cached prefix; only for models without windows."""
        if self.host is None or any(self.is_window(group) for group in range(len(self.groups))):
            return []
        keys = []
        for number in range(boundary, (len(tokens) // 4 - 1) // self.page_tokens):
            key = self.key(namespace, tokens, number)
            if key not in self.host:
                break
            keys.append(key)
        return keys

    def grant(
        self, sequence_id: SequenceId, lease: Lease, num_cached: int, num_fetched: int, brought: list[Key]
    ) -> Grant:
        tables = tuple(GroupPages(group, 0, pack(table)) for group, table in enumerate(lease.tables))
        fetches: tuple[Transfer, ...] = ()
        boundary = num_cached + num_fetched
        if brought:
            pages = [table[boundary : boundary + len(brought)] for table in lease.tables]
            lease.ticket = TicketId(1 + max(self.tickets, default=0) + 1000 * len(self.order))
            self.tickets[lease.ticket] = Ticket(sequence_id, boundary, brought, pages)
            moves = tuple(TransferPages(g, pack(ids), f"{g}:", bytes(32 * len(brought))) for g, ids in enumerate(pages))
            fetches = (Transfer(lease.ticket, moves, boundary, len(brought)),)
        cached, fetched = num_cached * self.page_tokens, (num_fetched + len(brought)) * self.page_tokens
        match = Match(cached, cached, fetched, "", 1)
        return Grant(sequence_id, lease.start, cached, fetched, tables, match, fetches)

    def grow(self, lease: Lease, group: int, num_pages: int) -> list[int]:
        fresh = self.take(group, max(num_pages - len(lease.tables[group]), 0))
        for page in fresh:
            lease.tables[group].append(page)
            self.read(lease, group, len(lease.tables[group]) - 1)
        return fresh

    def extend(self, extend: Extend) -> ExtendGrant | None:
        lease = self.leases[extend.sequence_id]
        assert lease.ticket is None, "a fetching sequence does not grow"
        num_pages = -(-extend.num_tokens // self.page_tokens)
        groups = range(len(self.groups))
        if any(num_pages - len(lease.tables[group]) > self.room(group, set()) for group in groups):
            self.refuse(extend.sequence_id)
            return None
        first = [len(lease.tables[group]) for group in groups]
        fresh = [self.grow(lease, group, num_pages) for group in groups]
        return ExtendGrant(extend.sequence_id, tuple(GroupPages(g, first[g], pack(fresh[g])) for g in groups))

    def publish(self, publish: Publish) -> Remap | None:
        lease = self.leases[publish.sequence_id]
        lease.tokens += publish.tokens
        assert lease.ticket is None and lease.computed <= publish.computed_tokens <= len(lease.tokens) // 4
        assert publish.computed_tokens <= min(len(table) for table in lease.tables) * self.page_tokens
        moved: list[GroupPages] = []
        last = lease.published_pages if lease.bypasses else publish.computed_tokens // self.page_tokens
        for number in range(lease.published_pages, last):
            entry = self.cached.setdefault(self.key(lease.namespace, lease.tokens, number), [0] * len(self.groups))
            moved += [move for group in range(len(self.groups)) if (move := self.merge(lease, entry, group, number))]
            if self.host is not None:
                self.host[self.key(lease.namespace, lease.tokens, number)] = [
                    self.spill(group, page) for group, page in enumerate(entry)
                ]
        lease.computed = publish.computed_tokens
        lease.published_pages = publish.computed_tokens // self.page_tokens
        for group in range(len(self.groups)):
            behind = self.first_read(group, lease.computed)
            for number in [n for n in lease.reads[group] if n < min(behind, lease.published_pages)]:
                self.unread(lease, group, number)
        return Remap(publish.sequence_id, tuple(moved)) if moved else None

    def merge(self, lease: Lease, entry: list[int], group: int, number: int) -> GroupPages | None:
        own = lease.tables[group][number]
        if not entry[group]:
            entry[group] = own
        if entry[group] == own:
            return None
        self.unread(lease, group, number)
        lease.tables[group][number] = entry[group]
        self.read(lease, group, number)
        return GroupPages(group, number, pack([entry[group]]))

    def release(self, release: Release) -> None:
        if self.kept.pop(release.sequence_id, None) is not None:
            return
        if release.sequence_id in self.dropped - self.leases.keys():
            self.refuse(release.sequence_id, RefusalReason.INVALID, "step.releases[0].sequence_id")
            return
        lease = self.leases.pop(release.sequence_id)
        if release.reason is ReleaseReason.PREEMPTED:
            self.keep(release.sequence_id, lease.tokens)
        if lease.ticket is not None:
            ticket = self.tickets[lease.ticket]
            ticket.is_orphan = True
            for group, pages in enumerate(ticket.pages):
                for page in pages:
                    self.readers[group][page] += 1
        self.drop(lease)

    def drop(self, lease: Lease) -> None:
        for group, numbers in enumerate(lease.reads):
            for number in list(numbers):
                self.unread(lease, group, number)

    def ack(self, ack: Ack) -> None:
        ticket = self.tickets.pop(ack.ticket)
        assert self.host is not None
        if ack.status is TransferStatus.MISSING:
            self.host.pop(ticket.keys[ack.num_done], None)
        elif ack.status is TransferStatus.FAILED:
            self.host.clear()  # the breaker
        for number, key in enumerate(ticket.keys[: ack.num_done]):
            if key not in self.cached:
                self.cached[key] = [pages[number] for pages in ticket.pages]
        if ticket.is_orphan:
            holder = Lease(Namespace(""), b"", 0, 0, 0, ticket.pages, [set(range(len(p))) for p in ticket.pages])
            self.drop(holder)
            return
        lease = self.leases.pop(ticket.sequence_id)
        self.drop(lease)
        assert lease.asked is not None
        self.acquire(lease.asked, ack.num_done)
        if ticket.sequence_id not in self.leases:
            self.keep(ticket.sequence_id, lease.asked.tokens)

    # -- after a restart --

    def adopt(self, adopt: Adopt) -> None:
        assert adopt.sequence_id not in self.leases
        if self.is_invalid(adopt.namespace, adopt.tokens):
            self.refuse(adopt.sequence_id, RefusalReason.INVALID, "step.adopts[0].tokens")
            return
        tables = [list(array("I", pages.page_ids)) for pages in adopt.tables]
        lease = Lease(adopt.namespace, adopt.tokens, 0, 0, 0, tables, [set() for _ in self.groups])
        lease.bypasses = adopt.bypass_cache
        for group, table in enumerate(tables):
            for number, page in enumerate(table):
                if page:
                    self.free[group] = [other for other in self.free[group] if other != page]
                    self.read(lease, group, number)
        self.leases[adopt.sequence_id] = lease
        full = adopt.computed_tokens // self.page_tokens
        for number in range(0 if lease.bypasses else full):
            entry = self.cached.setdefault(self.key(adopt.namespace, adopt.tokens, number), [0] * len(self.groups))
            for group in [group for group, table in enumerate(tables) if table[number]]:
                self.merge(lease, entry, group, number)
        lease.computed, lease.published_pages = adopt.computed_tokens, full
        self.adopted.append(adopt.sequence_id)
        self.grants.append(self.grant(adopt.sequence_id, lease, full, 0, []))
