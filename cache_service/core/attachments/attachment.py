"""One attached engine as the manager keeps it: what it declared, its leases, and the tickets that it writes under."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_service.core.attachments.counters import AttachmentCounters
from cache_service.core.attachments.gone_rows import note_gone
from cache_service.core.attachments.messages import Attach, Lookup, Path
from cache_service.core.attachments.path_hashes import PathHashes, hash_path
from cache_service.core.base.stats import AttachedEngine
from cache_service.core.device.eviction_order import Lru
from cache_service.core.host.hash_index import HostRow, HostView
from cache_service.core.host.host_key import scan_prefix
from cache_service.core.kinds.group import Group
from cache_service.core.kinds.layout import make_groups, make_layout
from session.words import MissReason, Namespace

# Of a path that Explain is told of: 2,048 page ids, or 16,384 tokens.
MAX_KEPT_BYTES = 65_536


@dataclass(slots=True)
class TierLease:
    """Rows that neither the quota nor their age drops. `hashes`: of the pages from Lookup's `local_pages` on."""

    namespace: Namespace
    hashes: tuple[bytes, ...]
    rows: tuple[tuple[bytes, HostRow], ...]
    until_ms: int


@dataclass(slots=True)
class Writing:
    """A ticket: rows of a page hash and the groups to write, in path order; `done` by rank and group, in pages.

    `full`: groups for which some rank found the store full, as a bit mask.
    """

    namespace: Namespace
    rows: tuple[tuple[bytes, int], ...]
    num_bytes: int
    begun_ms: int
    until_ms: int
    done: dict[int, dict[int, int]] = field(default_factory=dict)
    full: int = 0

    def num_pages(self, group: int) -> int:
        return sum(groups >> group & 1 for _, groups in self.rows)

    def groups(self) -> int:
        """Returns the groups of all its pages, as a bit mask."""
        found = 0
        for _, groups in self.rows:
            found |= groups
        return found


class KeptLookup(NamedTuple):
    """A Lookup for Explain; of a long path the beginning. `is_whole`: that is all of it."""

    lookup: Lookup
    asked_ms: int
    is_whole: bool
    found_all: bool


class Attachment:
    """`groups` say where a sequence can resume; they have no page on a device here."""

    def __init__(self, number: int, attach: Attach, view: HostView, now_ms: int, label: str) -> None:
        self.number, self.attach, self.view, self.used_ms = number, attach, view, now_ms
        self.label = label  # under which its counters go on when it has ended
        self.layout = make_layout(attach.groups, attach.page_tokens)
        self.groups: tuple[Group, ...] = make_groups(self.layout, Lru())
        self.sparse = tuple(group for group in self.groups if not self.layout.full_mask >> group.number & 1)
        self.leases: OrderedDict[int, TierLease] = OrderedDict()  # all last equally long: the oldest ends first
        self.tickets: OrderedDict[int, Writing] = OrderedDict()
        self.last_lease = self.last_ticket = 0
        self.held_pages = self.writing_pages = 0
        self.counters = AttachmentCounters()
        self.fetched_ms = now_ms  # when pages were read last
        self.kept_lookup: KeptLookup | None = None  # for Explain

    def namespace(self, path: Path) -> Namespace:
        return Namespace(self.attach.model, path.adapter, path.salt)

    @property
    def is_paused(self) -> bool:
        """Returns whether lookups find nothing for now: its last transfers failed, or the store fails."""
        return self.view.index.readers.is_paused(self.number)

    def hashes(self, path: Path) -> PathHashes:
        return hash_path(self.namespace(path), path, self.attach.page_tokens)

    def keep_lookup(self, lookup: Lookup, now_ms: int, *, found_all: bool) -> None:
        """For Explain: the last one that did not find all, or the last one."""
        if found_all and self.kept_lookup is not None and not self.kept_lookup.found_all:
            return
        path = lookup.path
        head = path._replace(page_ids=path.page_ids[:MAX_KEPT_BYTES], tokens=path.tokens[:MAX_KEPT_BYTES])
        self.kept_lookup = KeptLookup(lookup._replace(path=head), now_ms, head == path, found_all)

    def page_bytes(self, groups: int) -> int:
        """Returns the bytes of one page of these groups (a bit mask) on all ranks."""
        return self.view.index.page_bytes(self.view.fingerprint, groups)

    # Leases.

    def add_lease(self, lease: TierLease) -> int:
        self.last_lease += 1
        self.leases[self.last_lease] = lease
        self.held_pages += len(lease.rows)
        return self.last_lease

    def end_lease(self, number: int) -> TierLease | None:
        """Releases the lease's rows. Returns the lease; None where it has ended before."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            self.held_pages -= len(lease.rows)
            for key, row in lease.rows:
                self.view.index.let_go(key, row)
        return lease

    # Tickets.

    def add_ticket(self, writing: Writing) -> int:
        index, fingerprint = self.view.index, self.view.fingerprint
        for page_hash, groups in writing.rows:
            index.begin(fingerprint, page_hash, groups)
        index.quota.reserved_bytes += writing.num_bytes
        self.last_ticket += 1
        self.tickets[self.last_ticket] = writing
        self.writing_pages += len(writing.rows)
        return self.last_ticket

    def _take_ticket(self, number: int) -> Writing:
        writing = self.tickets.pop(number)
        self.writing_pages -= len(writing.rows)
        self.view.index.quota.reserved_bytes -= writing.num_bytes
        return writing

    def withdraw_ticket(self, number: int) -> None:
        """Ends a ticket that nobody was told of: its pages are given up, and may be reserved again at once.

        Nobody has written them, so no key is deleted for them; a delete could come after what the next one writes.
        """
        for page_hash, groups in self._take_ticket(number).rows:
            self.view.index.end_unwritten(self.view.fingerprint, page_hash, groups)
            self.not_taken(page_hash, groups, has_room=True)

    def end_ticket(self, number: int, done: dict[int, int]) -> int:
        """The first `done[group]` pages of each group become rows; keys of the others are dropped, since a rank may
        have written some. Returns how many pages have become findable."""
        writing = self._take_ticket(number)
        index, fingerprint = self.view.index, self.view.fingerprint
        left = dict(done)
        added: list[tuple[bytes, int]] = []
        for page_hash, groups in writing.rows:
            index.end(fingerprint, page_hash, groups)
            written = 0
            for group in left:
                if groups >> group & 1 and left[group]:
                    left[group] -= 1
                    written |= 1 << group
            if written:
                added.append((page_hash, written))
            if groups != written:
                index.delete(fingerprint, page_hash, groups & ~written)
                self.not_taken(page_hash, groups & ~written, has_room=not writing.full & groups & ~written)
        for page_hash, groups in reversed(added):
            index.add(fingerprint, page_hash, groups, writing.namespace)
        # The store learns the order too, for a service that is started anew and reads it from the times to live.
        index.touch(fingerprint, [page_hash for page_hash, _ in added])
        index.counters.spilled += len(added)
        index.shrink()
        return len(added)

    def not_taken(self, page_hash: bytes, groups: int, *, has_room: bool) -> None:
        """Notes groups of a page that were to be written and are not: for lack of room, or since a write failed."""
        self.counters.refused_pages += not has_room
        self.counters.given_up_pages += has_room
        why = MissReason.NOT_WRITTEN if has_room else MissReason.REFUSED
        note_gone(self.view.index, self.view.fingerprint + page_hash, groups, why)

    def stats(self) -> AttachedEngine:
        counters, now_ms = self.counters, self.view.index.now_ms
        begun_ms = next(iter(self.tickets.values())).begun_ms if self.tickets else now_ms
        return AttachedEngine(
            attachment=self.number,
            engine=self.attach.engine,
            model=self.attach.model,
            key_prefix=scan_prefix(self.view.fingerprint).decode(),
            num_leases=len(self.leases),
            num_tickets=len(self.tickets),
            num_lookups=counters.lookups,
            asked_pages=counters.asked_pages,
            usable_pages=counters.usable_pages,
            fetched_pages=counters.fetched_pages,
            reserved_pages=counters.reserved_pages,
            refused_pages=counters.refused_pages,
            committed_pages=counters.committed_pages,
            given_up_pages=counters.given_up_pages,
            misses=counters.all_misses(),
            peer=self.attach.peer,
            oldest_ticket_ms=max(0, now_ms - begun_ms),
        )

    def is_in_scope(self, namespace: Namespace | None) -> bool:
        """Returns whether a lease or a ticket is of the namespace (None: of any)."""
        names = [lease.namespace for lease in self.leases.values()]
        names += [writing.namespace for writing in self.tickets.values()]
        return any(namespace in (None, name) for name in names)
