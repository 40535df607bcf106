"""Pages into the host tier: those that it lacks, and of these as many as find room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from session.words import TransferStatus
from tier_client.client import TierClient
from tier_client.page_store import Buffer
from tier_client.values import PagePath, PageRange

# The bytes of pages of a group, by their numbers in the path.
Payloads = Callable[[int, tuple[int, ...]], list[Buffer]]


def save_pages(client: TierClient, ids: Sequence[bytes], ranges: Sequence[PageRange], payloads: Payloads) -> int:
    """Returns how many of the pages in `ranges` the tier has now, those of each group counted."""
    calls = client.calls
    ticket = calls.reserve(PagePath(b"".join(ids)), ranges)
    if ticket is None:
        return 0
    num_there = sum(one.end_page - one.first_page for one in ranges) - sum(len(one.pages) for one in ticket.pages)
    if not ticket.number:
        return max(0, num_there - ticket.num_refused)
    written: list[tuple[int, int]] = []
    status = TransferStatus.DONE
    try:
        for one in ticket.pages:
            values = payloads(one.group, one.pages)
            count, status = client.store.write(one.group, one.keys(client.config.rank), values)
            written.append((one.group, count))
            if count < len(values):
                calls.suspect_store()
                break
    finally:  # also when `payloads` raised: others may write what is left
        num_findable = calls.commit(ticket, client.config.rank, written, status)
    num_written = sum(count for _, count in written) if num_findable is not None else 0
    return max(0, num_there - ticket.num_refused + num_written)
