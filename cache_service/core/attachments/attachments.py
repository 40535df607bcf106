"""The verbs of attached engines: attach, lookup, reserve, commit, release; and what time does to leases and tickets.

An attachment ends when it is silent for too long, or when its store is lost. A call of one that has ended, or of a
former epoch, raises Detached: the engine attaches again, and nothing that it wrote before becomes findable by its word.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence

from cache_service.core.attachments import explaining, writing
from cache_service.core.attachments import lookup as looking
from cache_service.core.attachments.attachment import Attachment
from cache_service.core.attachments.counters import AttachmentCounters
from cache_service.core.attachments.gone_rows import GoneRows
from cache_service.core.attachments.messages import (
    MAX_HELD_PAGES,
    MAX_PATH_PAGES,
    Attach,
    Attached,
    AttachmentId,
    Commit,
    Committed,
    ExplainedPath,
    Found,
    LeaseEnd,
    Lookup,
    Reserve,
    Reserved,
    TierLimits,
)
from cache_service.core.attachments.path_hashes import layout_fingerprint
from cache_service.core.base.errors import Detached
from cache_service.core.base.manager_config import ManagerConfig
from cache_service.core.base.stats import AttachmentStats
from cache_service.core.base.types import AttachmentExplanation, FetchPolicy
from cache_service.core.host.breaker import Breaker
from cache_service.core.host.hash_index import HashIndex
from cache_service.core.host.host_key import scan_prefix
from cache_service.core.host.host_tiers import HostTiers, make_view
from session.errors import TooMany
from session.words import HASH_BYTES, Namespace

# Fingerprints of attached engines that one store is known to have rows of.
MAX_FINGERPRINTS = 4_096
# Names of engines that are counted apart; the others are counted together.
MAX_LABELS = 32
OTHER_ENGINES = "other"


class Attachments:
    """All attached engines. Their rows are in the same index as those of workers that name the same store."""

    def __init__(self, config: ManagerConfig, tiers: HostTiers, epoch: str) -> None:
        self._config, self._tiers, self._epoch = config, tiers, epoch
        chooses_fetches = config.fetch is FetchPolicy.AUTO
        self._lookups = looking.LookupLimits(config.max_live_sequences, config.host_lease_ms, chooses_fetches)
        self._last_number = 0
        self._fingerprints: set[bytes] = set()
        self.all: OrderedDict[int, Attachment] = OrderedDict()  # silent for longest first
        self._ended: dict[str, AttachmentCounters] = {}  # of attachments that have ended, by label
        self.limits = TierLimits(
            max_pages=MAX_PATH_PAGES,
            max_leases=config.max_live_sequences,
            max_held_pages=MAX_HELD_PAGES,
            max_tickets=config.max_open_tickets,
            lease_ms=config.host_lease_ms,
            ticket_ms=config.max_spill_ms,
            idle_ms=config.attachment_idle_ms,
            ttl_ms=config.host_ttl_ms,
        )

    def attach(self, attach: Attach, now_ms: int) -> Attached:
        """Returns the attachment's number and the limits that it is to keep. Raises TooMany."""
        if len(self.all) >= self._config.max_attachments and not self._make_room(now_ms):
            raise TooMany("attach", f"there are {self._config.max_attachments} attachments already")
        fingerprint = layout_fingerprint(attach)
        index = self._tiers.shared_index(attach.host_tier_id)
        if fingerprint not in index.group_bytes and len(index.group_bytes) >= MAX_FINGERPRINTS:
            self._forget_fingerprints(index)
            if len(index.group_bytes) >= MAX_FINGERPRINTS:
                raise TooMany("attach.fingerprint", f"the store has rows of {MAX_FINGERPRINTS} others")
        if index.drop_listener is None:
            index.drop_listener = GoneRows()
        self._last_number += 1
        view = make_view(index, fingerprint, attach.num_ranks, attach.groups)
        self._fingerprints.add(fingerprint)
        own = Breaker(self._config.breaker_failures, self._config.breaker_ms)
        index.readers.join(self._last_number, own)
        label = self._label(attach.engine)
        self.all[self._last_number] = Attachment(self._last_number, attach, view, now_ms, label)
        return Attached(self._epoch, self._last_number, self.limits, scan_prefix(fingerprint).decode())

    def _label(self, engine: str) -> str:
        """Returns the name under which an engine is counted: the first ones have their own."""
        label = engine if engine in self._ended or len(self._ended) < MAX_LABELS else OTHER_ENGINES
        self._ended.setdefault(label, AttachmentCounters())
        return label

    def _make_room(self, now_ms: int) -> bool:
        """Ends the attachment that was silent for longest, if for longer than a lease: of an engine that has ended, or
        of one that attaches again. Returns whether there was one."""
        number = next(iter(self.all))
        is_silent = now_ms - self.all[number].used_ms >= self.limits.lease_ms
        if is_silent:
            self._end(number)
        return is_silent

    def _forget_fingerprints(self, index: HashIndex) -> None:
        """Forgets the fingerprints of engines that are gone and have no row left."""
        used = {key[:-HASH_BYTES] for key in (*index.all_keys(), *index.pending)}
        used |= {attachment.view.fingerprint for attachment in self.all.values()}
        for fingerprint in self._fingerprints.intersection(index.group_bytes) - used:
            self._fingerprints.discard(fingerprint)
            del index.group_bytes[fingerprint], index.group_ranks[fingerprint]

    def find(self, named: AttachmentId, call: str, now_ms: int) -> Attachment:
        """Returns the attachment that calls. Raises Detached."""
        if named.epoch != self._epoch:
            raise Detached(f"{call}.epoch", "the service was started anew: attach again")
        attachment = self.all.get(named.number)
        if attachment is None:
            raise Detached(f"{call}.attachment", f"{named.number} has ended: attach again")
        attachment.used_ms = now_ms
        self.all.move_to_end(named.number)
        return attachment

    def lookup(self, attachment: Attachment, lookup: Lookup, now_ms: int) -> Found:
        """Returns how far the engine can resume from the tier. Raises InvalidInput, TooMany; then nothing changed."""
        return looking.look_up(attachment, lookup, self._lookups, now_ms)

    def reserve(self, attachment: Attachment, reserve: Reserve, now_ms: int) -> Reserved:
        """Returns what the engine is to write. Raises InvalidInput, TooMany; then nothing changed."""
        return writing.reserve(attachment, reserve, self.limits, now_ms)

    def withdraw(self, attachment: Attachment, ticket: int) -> None:
        """Ends a ticket that nobody was told of, unless it has ended."""
        if ticket in attachment.tickets:
            attachment.withdraw_ticket(ticket)

    def commit(self, attachment: Attachment, commit: Commit, now_ms: int) -> Committed:
        """Makes pages findable that every rank has written. Raises InvalidInput, UnknownTicket; then nothing
        changed."""
        return writing.commit(attachment, commit, now_ms)

    def release(self, attachment: Attachment, ends: Sequence[LeaseEnd], now_ms: int) -> int:
        """Returns how many of the leases were held. Raises InvalidInput; then nothing changed."""
        for number, end in enumerate(ends):
            writing.check_end(attachment, end, f"release.ends[{number}]")
        return sum(writing.release(attachment, end, now_ms) for end in ends)

    def explaining(self, asked: ExplainedPath, now_ms: int) -> Generator[None, None, tuple[AttachmentExplanation, ...]]:
        """For people. Raises InvalidInput, TooMany, UnknownAttachment."""
        return explaining.explain_path(self.all, asked, self._lookups, now_ms)

    # Time, and what ends attachments.

    def tick(self, now_ms: int) -> bool:
        """Ends leases and tickets whose time is over, and silent attachments. Returns whether it ended an
        attachment."""
        num_before = len(self.all)
        for attachment in self.all.values():
            while attachment.leases and next(iter(attachment.leases.values())).until_ms <= now_ms:
                attachment.end_lease(next(iter(attachment.leases)))
                attachment.counters.expired_leases += 1
            while attachment.tickets and next(iter(attachment.tickets.values())).until_ms <= now_ms:
                attachment.end_ticket(next(iter(attachment.tickets)), {})
                attachment.counters.expired_tickets += 1
            attachment.view.index.shrink()
        while self.all and now_ms - next(iter(self.all.values())).used_ms >= self.limits.idle_ms:
            self._end(next(iter(self.all)))
        return len(self.all) < num_before

    def lost(self, index: HashIndex) -> None:
        """Ends all attachments to a store that was flushed or replaced: their engines have to attach again."""
        for number in [number for number, attachment in self.all.items() if attachment.view.index is index]:
            self._end(number)

    def _end(self, number: int) -> None:
        attachment = self.all.pop(number)
        attachment.view.index.readers.leave(number)
        for lease in list(attachment.leases):
            attachment.end_lease(lease)
        for ticket in list(attachment.tickets):
            attachment.end_ticket(ticket, {})
        attachment.view.index.shrink()
        self._ended[attachment.label].add(attachment.counters)

    # For the manager.

    def tier_ids(self) -> set[str]:
        """Returns the stores that attached engines name."""
        return {attachment.attach.host_tier_id for attachment in self.all.values()}

    def is_in_scope(self, namespace: Namespace | None) -> bool:
        """Returns whether a lease or a ticket is of the namespace (None: of any)."""
        return any(attachment.is_in_scope(namespace) for attachment in self.all.values())

    def stats(self) -> AttachmentStats:
        """Returns the counts of all engines together, since the service's start."""
        total = AttachmentCounters()
        for counters in self._by_label().values():
            total.add(counters)
        return total.stats(tuple([attachment.stats() for attachment in self.all.values()]))

    def stats_by_engine(self) -> tuple[tuple[str, AttachmentStats], ...]:
        """Returns the same counts for each label."""
        told = []
        for label, counters in self._by_label().items():
            engines = [attachment.stats() for attachment in self.all.values() if attachment.label == label]
            told.append((label, counters.stats(tuple(engines))))
        return tuple(told)

    def _by_label(self) -> dict[str, AttachmentCounters]:
        """Returns the counts by label, those of attachments that have ended included."""
        found = {}
        for label, ended in self._ended.items():
            found[label] = AttachmentCounters()
            found[label].add(ended)
        for attachment in self.all.values():
            found[attachment.label].add(attachment.counters)
        return found
