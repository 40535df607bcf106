"""How far an attached engine can resume a path from the host tier, and which pages it has to read for that."""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.attachments.attachment import Attachment, TierLease
from cache_service.core.attachments.gone_rows import why_gone
from cache_service.core.attachments.messages import MAX_HELD_PAGES, Found, Lookup, TierPages
from cache_service.core.attachments.path_hashes import PathHashes
from cache_service.core.base.fetch_estimate import estimate
from cache_service.core.host.host_key import key_prefix
from cache_service.core.kinds.group import limiting_group, resume
from session.errors import InvalidInput, TooMany
from session.words import MissReason

# Pages that are hashed before the tier is asked for them: 1, 2, 4 and so on up to this.
_MOST_AT_ONCE = 512


class LookupLimits(NamedTuple):
    """`chooses_fetches`: computes what takes longer to read, by the rates that the engine states."""

    max_leases: int
    lease_ms: int
    chooses_fetches: bool


def look_up(attachment: Attachment, lookup: Lookup, limits: LookupLimits, now_ms: int) -> Found:
    """Raises InvalidInput, TooMany; then nothing changed."""
    hashes = attachment.hashes(lookup.path)
    if lookup.local_pages > hashes.num_pages:
        raise InvalidInput("lookup.local_pages", f"is {lookup.local_pages}; the path has {hashes.num_pages} pages")
    found = judge(attachment, lookup, hashes, limits, now_ms)
    if not lookup.lease:
        return found
    if found.pages:
        found = found._replace(lease=_take_lease(attachment, lookup, hashes, found, limits, now_ms))
    num_asked = max(hashes.reusable_pages - lookup.local_pages, 0)
    attachment.counters.looked_up(num_asked, found, lookup.local_pages)
    attachment.keep_lookup(lookup, now_ms, found_all=found.usable_pages - lookup.local_pages == num_asked)
    return found


def judge(attachment: Attachment, lookup: Lookup, hashes: PathHashes, limits: LookupLimits, now_ms: int) -> Found:
    """Returns how far the rows reach, and whether reading them pays; reads only."""
    found = find(attachment, hashes, lookup.local_pages)
    if limits.chooses_fetches and found.pages and not _pays(attachment, lookup, found, now_ms):
        return _declined(found, lookup.local_pages)
    return found


def _pays(attachment: Attachment, lookup: Lookup, found: Found, now_ms: int) -> bool:
    """Returns whether reading takes less time than computing; True while that is not known."""
    num_tokens = (found.usable_pages - lookup.local_pages) * attachment.attach.page_tokens
    num_bytes = sum([len(one.pages) * attachment.attach.groups[one.group].page_bytes for one in found.pages])
    known = estimate(num_tokens, num_bytes, lookup.rates, now_ms - attachment.fetched_ms)
    return known is None or known.pays


def _declined(found: Found, local: int) -> Found:
    return found._replace(
        usable_pages=local,
        pages=(),
        limiting_group="",
        miss_reason=MissReason.FETCH_SLOWER,
        declined_pages=found.usable_pages - local,
    )


def find(attachment: Attachment, hashes: PathHashes, local: int) -> Found:
    """Returns how far the rows reach; reads only."""
    index = attachment.view.index
    if attachment.is_paused:
        return Found(local, local, miss_reason=MissReason.BREAKER_OPEN, breaker_open=True)
    limit = max(hashes.reusable_pages, local)
    floor = index.cleared.floor(hashes.digest)
    matched = _matched(attachment, hashes, local, limit, floor)
    flags = _residency(attachment, hashes, local, matched, floor)
    # At the end of what it holds itself the engine can resume, whatever the tier has.
    usable = max(resume(attachment.sparse, flags, matched), local)
    limiting = limiting_group(attachment.sparse, flags, matched) if usable < matched else None
    if limiting is not None:
        reason = limiting.miss_reason
    elif matched < limit:
        reason = _why_unmatched(attachment, hashes.run(matched, matched + 1)[0], floor)
    else:
        reason = MissReason.PAGE_TAIL if hashes.reusable_pages < hashes.num_pages else MissReason.NONE
    pages = _to_read(attachment, hashes, local, usable)
    return Found(usable, matched, 0, pages, limiting.spec.name if limiting is not None else "", reason)


def _why_unmatched(attachment: Attachment, page_hash: bytes, floor: int) -> MissReason:
    """Returns why the page is not in its FULL groups: the reason of the first that lacks it."""
    index, fingerprint = attachment.view.index, attachment.view.fingerprint
    missing = attachment.layout.full_mask & ~index.stored(fingerprint, page_hash, floor)
    return why_gone(index, fingerprint + page_hash, (missing & -missing).bit_length() - 1, floor)


def _matched(attachment: Attachment, hashes: PathHashes, local: int, limit: int, floor: int) -> int:
    """Returns how many leading pages the FULL groups have; without such a group all, up to `limit`."""
    mask = attachment.layout.full_mask
    if not mask:
        return limit
    index, fingerprint = attachment.view.index, attachment.view.fingerprint
    page, count = local, 1
    while page < limit:
        stop = min(page + count, limit)
        page += index.leading(fingerprint, hashes.run(page, stop), mask, floor)
        if page < stop:
            break
        count = min(2 * count, _MOST_AT_ONCE)
    return page


def _residency(attachment: Attachment, hashes: PathHashes, local: int, end: int, floor: int) -> list[bytes]:
    """Returns for each group with holes a byte for each page up to `end`; the engine's own `local` pages count."""
    if attachment.layout.resumes_anywhere:
        return []
    index, fingerprint = attachment.view.index, attachment.view.fingerprint
    flags = [bytearray(b"\1" * local) for _ in attachment.sparse]
    for page_hash in hashes.run(local, end):
        groups = index.stored(fingerprint, page_hash, floor)
        for resident, group in zip(flags, attachment.sparse, strict=True):
            resident.append(groups >> group.number & 1)
    return [bytes(resident) for resident in flags]


def _to_read(attachment: Attachment, hashes: PathHashes, local: int, usable: int) -> tuple[TierPages, ...]:
    if usable == local:
        return ()
    fingerprint = attachment.view.fingerprint
    found = []
    for group in attachment.groups:
        first = max(local, usable - group.reach_pages())
        if first < usable:
            prefix = key_prefix(fingerprint, group.number)
            page_hashes = tuple(hashes.run(first, usable))
            found.append(TierPages(group.number, prefix, tuple(range(first, usable)), page_hashes))
    return tuple(found)


def _take_lease(
    attachment: Attachment, lookup: Lookup, hashes: PathHashes, found: Found, limits: LookupLimits, now_ms: int
) -> int:
    index, fingerprint = attachment.view.index, attachment.view.fingerprint
    if len(attachment.leases) >= limits.max_leases:
        raise TooMany("lookup.lease", f"{limits.max_leases} leases are held")
    page_hashes = tuple(hashes.run(lookup.local_pages, found.usable_pages))
    held = page_hashes[min(pages.pages[0] for pages in found.pages) - lookup.local_pages :]
    if attachment.held_pages + len(held) > MAX_HELD_PAGES:
        raise TooMany("lookup.lease", f"leases would hold {attachment.held_pages + len(held)} pages")
    # A use: the least recently used rows go first, and the store's times to live begin anew, tails before heads.
    index.touch(fingerprint, held)
    # Between the pages that two groups read there may be ones that were never written.
    keys = [key for page_hash in held if (key := fingerprint + page_hash) in index.rows]
    rows = tuple([(key, index.hold(key)) for key in keys])
    return attachment.add_lease(
        TierLease(attachment.namespace(lookup.path), page_hashes, rows, now_ms + limits.lease_ms)
    )
