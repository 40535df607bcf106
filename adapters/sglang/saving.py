"""Pages of one group into the host tier: those that it lacks, and of these as many as find room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tier_client.client import TierClient
from tier_client.page_store import Buffer
from tier_client.values import PagePath, PageRange


def save_pages(client: TierClient, ids: Sequence[bytes], payloads: Callable[[tuple[int, ...]], list[Buffer]]) -> int:
    """Returns how many of the pages the tier has now. `payloads` gives the bytes of the pages with these numbers."""
    calls = client.calls
    ticket = calls.reserve(PagePath(b"".join(ids)), [PageRange(0, 0, len(ids))])
    if ticket is None:
        return 0
    num_left = len(ids) - ticket.num_refused
    if not ticket.number:
        return num_left
    wanted, rank = ticket.pages[0], client.config.rank
    values = payloads(wanted.pages)
    count, status = client.store.write(0, wanted.keys(rank), values)
    if count < len(values):
        calls.suspect_store()
    return num_left - len(values) + (calls.commit(ticket, rank, [(0, count)], status) or 0)
