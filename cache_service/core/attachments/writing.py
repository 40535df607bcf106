"""Which pages an attached engine is to write, and what its ranks' commits make findable."""

from __future__ import annotations

from cache_service.core.attachments.attachment import Attachment, Writing
from cache_service.core.attachments.messages import (
    MAX_HELD_PAGES,
    Commit,
    Committed,
    GroupRange,
    LeaseEnd,
    Reserve,
    Reserved,
    TierLimits,
    TierPages,
)
from cache_service.core.attachments.path_hashes import PathHashes
from cache_service.core.base.errors import UnknownTicket
from cache_service.core.host.host_key import key_prefix
from session.errors import InvalidInput, TooMany
from session.words import MissReason, TransferStatus


def reserve(attachment: Attachment, asked: Reserve, limits: TierLimits, now_ms: int) -> Reserved:
    """Raises InvalidInput, TooMany; then nothing changed."""
    hashes = attachment.hashes(asked.path)
    wanted = _wanted(attachment, hashes, asked.ranges)
    if len(attachment.tickets) >= limits.max_tickets:
        raise TooMany("reserve", f"{limits.max_tickets} tickets are open")
    rows, num_refused = _admitted(attachment, hashes, wanted)
    if attachment.is_paused:
        return Reserved(breaker_open=True)
    attachment.counters.reserved_pages += len(rows)
    if not rows:
        return Reserved(num_refused=num_refused)
    pairs = tuple((page_hash, groups) for _, page_hash, groups in rows)
    num_bytes = sum(attachment.page_bytes(groups) for _, groups in pairs)
    writing = Writing(attachment.namespace(asked.path), pairs, num_bytes, now_ms, now_ms + limits.ticket_ms)
    ticket = attachment.add_ticket(writing)
    return Reserved(ticket, _by_group(attachment, rows), num_refused)


def _wanted(attachment: Attachment, hashes: PathHashes, ranges: tuple[GroupRange, ...]) -> dict[int, int]:
    """Returns by page number the groups that are asked for, as a bit mask."""
    wanted: dict[int, int] = {}
    for number, (group, first, count) in enumerate(ranges):
        where = f"reserve.ranges[{number}]"
        if group >= len(attachment.groups):
            raise InvalidInput(f"{where}.group", f"is {group}; there are {len(attachment.groups)} groups")
        if not count:
            raise InvalidInput(f"{where}.num_pages", "must be at least 1")
        if first + count > hashes.num_pages:
            raise InvalidInput(f"{where}.num_pages", f"ends at {first + count}; the path has {hashes.num_pages} pages")
        for page in range(first, first + count):
            wanted[page] = wanted.get(page, 0) | 1 << group
    return wanted


def _admitted(
    attachment: Attachment, hashes: PathHashes, wanted: dict[int, int]
) -> tuple[list[tuple[int, bytes, int]], int]:
    """Returns page number, hash and groups of what is to be written, first pages first, and how many found no room.

    Rows that no lease holds make room, so only what leases hold and what is being written takes from the quota. A store
    that fails takes nothing.
    """
    index, fingerprint = attachment.view.index, attachment.view.fingerprint
    floor, is_failing = index.cleared.floor(hashes.digest), attachment.is_paused
    room = 0 if is_failing else index.quota.room_bytes
    most = MAX_HELD_PAGES - attachment.writing_pages
    rows: dict[bytes, tuple[int, bytes, int]] = {}
    num_refused = 0
    for page in sorted(wanted):
        page_hash = hashes.run(page, page + 1)[0]
        groups = wanted[page] & ~index.known(fingerprint, page_hash, floor)
        if not groups or page_hash in rows:  # an id may stand twice in a path
            continue
        num_bytes = attachment.page_bytes(groups)
        if num_bytes > room or len(rows) >= most:
            attachment.not_taken(page_hash, groups, has_room=is_failing)
            num_refused += 1
            continue
        room -= num_bytes
        rows[page_hash] = page, page_hash, groups
    return list(rows.values()), num_refused


def _by_group(attachment: Attachment, rows: list[tuple[int, bytes, int]]) -> tuple[TierPages, ...]:
    fingerprint = attachment.view.fingerprint
    found = []
    for group in range(len(attachment.groups)):
        mine = [(page, page_hash) for page, page_hash, groups in rows if groups >> group & 1]
        if mine:
            pages, page_hashes = zip(*mine, strict=True)
            found.append(TierPages(group, key_prefix(fingerprint, group), pages, page_hashes))
    return tuple(found)


def commit(attachment: Attachment, said: Commit, now_ms: int) -> Committed:
    """Raises InvalidInput, UnknownTicket; then nothing changed."""
    if not 1 <= said.ticket <= attachment.last_ticket:
        raise UnknownTicket("commit.ticket", f"{said.ticket} was never issued")
    if said.rank >= attachment.attach.num_ranks:
        raise InvalidInput("commit.rank", f"is {said.rank}; there are {attachment.attach.num_ranks} ranks")
    if said.status not in (TransferStatus.DONE, TransferStatus.FAILED):
        raise InvalidInput("commit.status", f"is {said.status.name}; must be DONE or FAILED")
    writing = attachment.tickets.get(said.ticket)
    if writing is None:
        return Committed(is_open=False)
    done = _done(attachment, writing, said)
    if said.rank in writing.done:
        return Committed(is_open=True)
    writing.done[said.rank] = done
    readers = attachment.view.index.readers
    if said.status is TransferStatus.FAILED:
        readers.failed(attachment.number, now_ms)
    elif any(done.values()):
        readers.succeeded(attachment.number)
    if said.status is TransferStatus.DONE:
        writing.full |= _short(writing, done)
    writers = _writers(attachment, writing)
    if not writers <= writing.done.keys():
        return Committed(is_open=True)
    num_findable = attachment.end_ticket(said.ticket, _on_all_ranks(attachment, writing))
    attachment.counters.committed_pages += num_findable
    return Committed(True, num_findable)


def _short(writing: Writing, done: dict[int, int]) -> int:
    """Returns the groups, as a bit mask, of which the store did not take all pages: it is full."""
    full = 0
    for group, count in done.items():
        if count < writing.num_pages(group):
            full |= 1 << group
    return full


def _writers(attachment: Attachment, writing: Writing) -> set[int]:
    """Returns the ranks that write under the ticket: of replicated groups the first one alone."""
    of_each_rank = writing.groups()
    for group, spec in enumerate(attachment.attach.groups):
        if spec.replicated:
            of_each_rank &= ~(1 << group)
    return set(range(attachment.attach.num_ranks if of_each_rank else 1))


def _on_all_ranks(attachment: Attachment, writing: Writing) -> dict[int, int]:
    """Returns by group how many of its first pages are written on all ranks that write them."""
    found = {}
    for group, spec in enumerate(attachment.attach.groups):
        ranks = [writing.done[0]] if spec.replicated else list(writing.done.values())
        found[group] = min([done.get(group, 0) for done in ranks])
    return found


def _done(attachment: Attachment, writing: Writing, said: Commit) -> dict[int, int]:
    """Returns by group how many of its first pages this rank has written. Raises InvalidInput."""
    done: dict[int, int] = {}
    for number, written in enumerate(said.written):
        where = f"commit.written[{number}]"
        if written.group >= len(attachment.groups) or written.group in done:
            raise InvalidInput(f"{where}.group", f"is {written.group}; a group of this engine, and each once")
        spec = attachment.attach.groups[written.group]
        if spec.replicated and said.rank:
            raise InvalidInput(f"{where}.group", f"is {written.group}, which is replicated: rank 0 writes it for all")
        most = writing.num_pages(written.group)
        if written.num_pages > most:
            raise InvalidInput(f"{where}.num_pages", f"is {written.num_pages}; the ticket has {most} of the group")
        expected = written.num_pages * spec.page_bytes
        if written.num_bytes != expected:
            reason = f"is {written.num_bytes}; {written.num_pages} pages as attached have {expected}"
            raise InvalidInput(f"{where}.num_bytes", reason)
        done[written.group] = written.num_pages
    return done


def check_end(attachment: Attachment, end: LeaseEnd, where: str) -> None:
    """Raises InvalidInput for an end that does not fit its lease."""
    if not 1 <= end.lease <= attachment.last_lease:
        raise InvalidInput(f"{where}.lease", f"{end.lease} was never granted")
    lease = attachment.leases.get(end.lease)
    if lease is not None and end.num_pages > len(lease.hashes):
        raise InvalidInput(f"{where}.num_pages", f"is {end.num_pages}; the lease is of {len(lease.hashes)} pages")


def release(attachment: Attachment, end: LeaseEnd, now_ms: int) -> bool:
    """Ends a lease and counts what was read; a row whose value was missing or damaged is dropped.

    Returns False for a lease that has ended already.
    """
    lease = attachment.end_lease(end.lease)
    if lease is None:
        return False
    index = attachment.view.index
    index.counters.fetched += end.num_pages
    attachment.counters.fetched_pages += end.num_pages
    attachment.fetched_ms = now_ms if end.num_pages else attachment.fetched_ms
    if end.status is TransferStatus.FAILED:
        index.readers.failed(attachment.number, now_ms)
    elif end.num_pages or end.status is not TransferStatus.DONE:
        index.readers.succeeded(attachment.number)
    if end.status in (TransferStatus.MISSING, TransferStatus.CORRUPT) and end.num_pages < len(lease.hashes):
        is_corrupt = end.status is TransferStatus.CORRUPT
        index.counters.missing += not is_corrupt
        index.counters.corrupt += is_corrupt
        why = MissReason.DAMAGED if is_corrupt else MissReason.LOST
        index.forget(attachment.view.fingerprint, lease.hashes[end.num_pages], why)
    index.shrink()
    return True
