"""Which values of a transfer depend on which others: a page can be used only with the page before it."""

from __future__ import annotations

from typing import NamedTuple

from session.words import TicketId, Transfer
from worker_service.transfer.moved_pages import MovedPage, moved_pages


class _End(NamedTuple):
    """Where a transfer ended, and the key of its last page."""

    ticket: TicketId
    page: int
    key: bytes


class PageNeeds:
    """A long prompt's pages move in several transfers, one ticket after the other: such are taken for one prompt's.

    Where they were not, as where the transfers of two prompts alternate, a store drops another page than the best one
    first, and no more.
    """

    def __init__(self) -> None:
        self._last: _End | None = None

    def of(self, transfer: Transfer) -> list[tuple[bytes, bytes]]:
        """Returns pairs of keys (dependent, parent): the dependent's value cannot be used without the parent's.

        Values of all groups need that of the page before, in a group of which each page moves: one that keeps whole
        prompts.
        """
        items = moved_pages(transfer, 0, transfer.num_pages)
        whole = next((one.group for one in transfer.groups if _moves_all(items, one.group, transfer)), None)
        last, self._last = self._last, None
        if whole is None:
            return []
        keys = [item.key for item in items if item.group == whole]
        goes_on = last is not None and (last.ticket + 1, last.page) == (transfer.ticket, transfer.first_page)
        before = [last.key if last is not None and goes_on else None, *keys]
        self._last = _End(transfer.ticket, transfer.first_page + transfer.num_pages, keys[-1])
        return [(item.key, need) for item in items if (need := before[item.page]) is not None]


def _moves_all(items: list[MovedPage], group: int, transfer: Transfer) -> bool:
    return bool(transfer.num_pages) and sum(item.group == group for item in items) == transfer.num_pages
