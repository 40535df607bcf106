"""Explain for attached engines: how far a path of pages could be resumed now, and why no further. Reads only."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

from cache_service.core.attachments.attachment import Attachment, KeptLookup
from cache_service.core.attachments.gone_rows import why_gone
from cache_service.core.attachments.lookup import LookupLimits, judge
from cache_service.core.attachments.messages import MAX_PATH_PAGES, ExplainedPath, Found, Lookup
from cache_service.core.attachments.path_hashes import PathHashes
from cache_service.core.base.errors import UnknownAttachment
from cache_service.core.base.fetch_estimate import FetchRates
from cache_service.core.base.types import AttachmentExplanation, TierGroupExplanation
from cache_service.core.host.hash_index import HostView
from session.errors import InvalidInput, TooMany
from session.words import MissReason

# Attachments that a note names.
MAX_NAMED = 8

# Pages that are hashed or looked up between two yields: about 1 ms.
SLICE_PAGES = 1_024

_SENTENCES = {
    MissReason.NONE: "All of these pages can be used.",
    MissReason.PAGE_TAIL: "Only whole pages are reused, and the last token is always computed.",
    MissReason.NEVER_SEEN: "As far as the service knows, no engine that shares pages with this one wrote page {page}.",
    MissReason.EVICTED: "Page {page} was written, and evicted since: by the quota, or at the end of its time to live.",
    MissReason.CLEARED: "Page {page} was written, and dropped by a Clear call since.",
    MissReason.NO_SNAPSHOT: "Group {group} has no state at a later boundary.",
    MissReason.WINDOW_GONE: "The window of group {group} before a later boundary is not there.",
    MissReason.FETCH_SLOWER: "{declined} more pages are there, and computed sooner than read, by the engine's rates.",
    MissReason.REFUSED: "When page {page} was to be written there was no room, under the quota or in the store.",
    MissReason.NOT_WRITTEN: "Page {page} was to be written and was not: the store failed, or the engine gave it up.",
    MissReason.LOST: "The store no longer had the value of page {page} when an engine read it.",
    MissReason.DAMAGED: "The value of page {page} failed its checks when an engine read it, and was dropped.",
    MissReason.BREAKER_OPEN: "The store fails, or this engine's way to it: nothing is found or written for now.",
}


def explain_path(
    attachments: Mapping[int, Attachment], asked: ExplainedPath, limits: LookupLimits, now_ms: int
) -> Generator[None, None, tuple[AttachmentExplanation, ...]]:
    """Other calls may come in between. Raises InvalidInput, TooMany, UnknownAttachment."""
    told = []
    for attachment in _meant(attachments, asked):
        told.append((yield from _explain(attachment, asked, limits, now_ms, attachments.values())))
        yield
    return tuple(told)


def _meant(attachments: Mapping[int, Attachment], asked: ExplainedPath) -> list[Attachment]:
    if not asked.attachment:
        found = [one for _, one in sorted(attachments.items()) if one.attach.model == asked.model]
        if not found:
            raise UnknownAttachment("request.namespace.model", f"no attached engine is of {asked.model!r}")
        return found
    one = attachments.get(asked.attachment)
    if one is None:
        raise UnknownAttachment("request.attachment", f"{asked.attachment} is not attached")
    if asked.model not in ("", one.attach.model):
        reason = f"is {asked.model!r}; attachment {asked.attachment} is of {one.attach.model!r}"
        raise InvalidInput("request.namespace.model", reason)
    return [one]


def _explain(
    attachment: Attachment, asked: ExplainedPath, limits: LookupLimits, now_ms: int, others: Iterable[Attachment]
) -> Generator[None, None, AttachmentExplanation]:
    kept = attachment.kept_lookup
    lookup, hashes = _question(attachment, asked, kept)
    for end in range(SLICE_PAGES, hashes.num_pages, SLICE_PAGES):
        hashes.run(end - 1, end)
        yield
    groups = yield from _groups(attachment, hashes, lookup.local_pages)
    found = judge(attachment, lookup, hashes, limits, now_ms)
    page_tokens = attachment.attach.page_tokens
    return AttachmentExplanation(
        attachment=attachment.number,
        engine=attachment.attach.engine,
        num_pages=max(hashes.reusable_pages, lookup.local_pages),
        page_tokens=page_tokens,
        local_pages=lookup.local_pages,
        matched_pages=found.matched_pages,
        usable_pages=found.usable_pages,
        usable_tokens=found.usable_pages * page_tokens,
        declined_pages=found.declined_pages,
        limiting_group=found.limiting_group,
        miss_reason=found.miss_reason,
        groups=groups,
        notes=(*_verdict(groups, found), *_form_notes(kept, asked), *_strangers(attachment, others)),
        lookup_age_ms=now_ms - kept.asked_ms if kept is not None and asked.path is None else None,
    )


def _question(attachment: Attachment, asked: ExplainedPath, kept: KeptLookup | None) -> tuple[Lookup, PathHashes]:
    """The Lookup that is explained, and the hashes of its pages."""
    if asked.path is not None:
        lookup = Lookup(asked.path, rates=kept.lookup.rates if kept is not None else FetchRates())
    elif kept is not None:
        lookup = kept.lookup
    else:
        raise InvalidInput("request.page_ids", f"must be set: attachment {attachment.number} has looked nothing up")
    hashes = attachment.hashes(lookup.path)
    if hashes.num_pages > MAX_PATH_PAGES:
        raise TooMany("request.tokens", f"are {hashes.num_pages} pages; at most {MAX_PATH_PAGES}")
    return lookup._replace(local_pages=min(lookup.local_pages, hashes.num_pages)), hashes


def _groups(
    attachment: Attachment, hashes: PathHashes, local: int
) -> Generator[None, None, tuple[TierGroupExplanation, ...]]:
    end = max(hashes.reusable_pages, local)
    flags, writing = yield from _residents(attachment, hashes, local, end)
    full = [group.number for group in attachment.groups if attachment.layout.full_mask >> group.number & 1]
    matched = min([_leading(flags[number]) for number in full], default=end)
    told = []
    for group in attachment.groups:
        resident = bytes(flags[group.number])
        limit = end if group.number in full else matched  # no resume lies beyond what the FULL groups have
        usable = max(group.resume(resident, limit), local)
        # Of each kind: if that page were there, the group could resume behind it.
        missing = usable if usable < limit else None
        reason = MissReason.NONE if missing is None else _why_missing(attachment, hashes, missing, group.number)
        told.append(
            TierGroupExplanation(
                name=group.spec.name,
                kind=group.spec.kind,
                leading_pages=_leading(resident),
                resident_pages=sum(resident),
                usable_pages=usable,
                missing_page=missing,
                miss_reason=reason,
                writing_pages=writing[group.number],
                replicated=group.spec.replicated,
            )
        )
    return tuple(told)


def _residents(
    attachment: Attachment, hashes: PathHashes, local: int, end: int
) -> Generator[None, None, tuple[list[bytearray], list[int]]]:
    """Returns for each group a byte for each page, 0 for a hole, and how many of its holes are being written."""
    index, fingerprint = attachment.view.index, attachment.view.fingerprint
    floor = index.cleared.floor(hashes.digest)
    flags = [bytearray(b"\1" * local) for _ in attachment.groups]
    writing = [0] * len(flags)
    for page in range(local, end):
        page_hash = hashes.run(page, page + 1)[0]
        stored = index.stored(fingerprint, page_hash, floor)
        pending = index.pending.get(fingerprint + page_hash, 0) & ~stored
        for number, resident in enumerate(flags):
            resident.append(stored >> number & 1)
            writing[number] += pending >> number & 1
        if page % SLICE_PAGES == SLICE_PAGES - 1:
            yield
    return flags, writing


def _why_missing(attachment: Attachment, hashes: PathHashes, page: int, group: int) -> MissReason:
    key = attachment.view.fingerprint + hashes.run(page, page + 1)[0]
    return why_gone(attachment.view.index, key, group, attachment.view.index.cleared.floor(hashes.digest))


def _leading(resident: bytes | bytearray) -> int:
    first_hole = resident.find(b"\0")
    return len(resident) if first_hole < 0 else first_hole


def _verdict(groups: Iterable[TierGroupExplanation], found: Found) -> list[str]:
    """What keeps the path from being used further."""
    sentence = _SENTENCES[found.miss_reason]
    notes = [sentence.format(page=found.matched_pages, group=found.limiting_group, declined=found.declined_pages)]
    for one in groups:
        if one.name == found.limiting_group and one.missing_page is not None:
            notes.append(_SENTENCES[one.miss_reason].format(page=one.missing_page))
        if one.writing_pages:
            notes.append(f"{one.writing_pages} pages of group {one.name} are being written now.")
    return notes


def _form_notes(kept: KeptLookup | None, asked: ExplainedPath) -> list[str]:
    """What is unusual about the pages that were named."""
    if kept is None:
        return []
    if asked.path is None:
        return [] if kept.is_whole else ["The Lookup was of a longer path; this is its beginning."]
    if bool(asked.path.page_ids) == bool(kept.lookup.path.page_ids):
        return []
    return [f"This engine asks by {'page ids' if kept.lookup.path.page_ids else 'tokens'}: other pages than these."]


def _strangers(attachment: Attachment, others: Iterable[Attachment]) -> list[str]:
    """Engines of the same model that share nothing with this one, which is a common mistake."""
    named = [
        other.number
        for other in others
        if other.attach.model == attachment.attach.model and not _share(other.view, attachment.view)
    ]
    if not named:
        return []
    told = ", ".join(map(str, sorted(named)[:MAX_NAMED]))
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return [
        f"Of the same model, and sharing no page with it: attachment {told}{more}. "
        "Their fingerprint, page size, groups, ranks or store differ."
    ]


def _share(one: HostView, other: HostView) -> bool:
    return one.fingerprint == other.fingerprint and one.index is other.index
