"""Counts of what attached engines asked, found and wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_service.core.attachments.messages import Found
from cache_service.core.base.stats import AttachedEngine, AttachmentStats
from session.words import MissReason


@dataclass(slots=True)
class AttachmentCounters:
    """Of one attachment, or of several. Pages are counted once, whatever their groups."""

    lookups: int = 0
    asked_pages: int = 0
    usable_pages: int = 0
    reserved_pages: int = 0
    refused_pages: int = 0
    committed_pages: int = 0
    given_up_pages: int = 0
    fetched_pages: int = 0
    expired_leases: int = 0
    expired_tickets: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)

    def looked_up(self, asked_pages: int, found: Found, local_pages: int) -> None:
        self.lookups += 1
        self.asked_pages += asked_pages
        self.usable_pages += found.usable_pages - local_pages
        self.misses[found.miss_reason] = self.misses.get(found.miss_reason, 0) + 1

    def add(self, other: AttachmentCounters) -> None:
        self.lookups += other.lookups
        self.asked_pages += other.asked_pages
        self.usable_pages += other.usable_pages
        self.reserved_pages += other.reserved_pages
        self.refused_pages += other.refused_pages
        self.committed_pages += other.committed_pages
        self.given_up_pages += other.given_up_pages
        self.fetched_pages += other.fetched_pages
        self.expired_leases += other.expired_leases
        self.expired_tickets += other.expired_tickets
        for reason, count in other.misses.items():
            self.misses[reason] = self.misses.get(reason, 0) + count

    def all_misses(self) -> tuple[tuple[MissReason, int], ...]:
        return tuple(sorted(self.misses.items()))

    def stats(self, engines: tuple[AttachedEngine, ...]) -> AttachmentStats:
        """`engines`: those of them that are attached now."""
        return AttachmentStats(
            num_attachments=len(engines),
            num_leases=sum([one.num_leases for one in engines]),
            num_tickets=sum([one.num_tickets for one in engines]),
            num_lookups=self.lookups,
            asked_pages=self.asked_pages,
            usable_pages=self.usable_pages,
            reserved_pages=self.reserved_pages,
            refused_pages=self.refused_pages,
            committed_pages=self.committed_pages,
            num_expired_leases=self.expired_leases,
            num_expired_tickets=self.expired_tickets,
            misses=self.all_misses(),
            fetched_pages=self.fetched_pages,
            given_up_pages=self.given_up_pages,
            engines=engines,
            oldest_ticket_ms=max([one.oldest_ticket_ms for one in engines], default=0),
        )
