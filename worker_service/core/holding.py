"""Decides which waiting requests should wait for a sibling that is about to publish what they need.

sibling   |#### published ####|.... yet to publish ....|   still prefilling or fetching
request   |######## common prefix ########|~~~~~~~~~~~~~
                              '-- two pages or more: hold --'
"""

from __future__ import annotations

from session.words import TOKEN_BYTES, Namespace
from worker_service.core.sequence import Sequence, State

# One page is cheaper to compute again than to wait a launch for.
MIN_PAGES = 2

_ADMITTED = (State.ACQUIRING, State.FETCHING, State.RUNNING)


class Siblings:
    """Admitted sequences that have yet to publish, by namespace and first page."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._by_start: dict[tuple[Namespace, bytes], list[Sequence]] = {}

    def admit(self, sequence: Sequence) -> None:
        if sequence.request.bypass_cache:
            return
        if self._to_publish(sequence, len(sequence.tokens) // self._page_tokens) >= MIN_PAGES:
            self._by_start.setdefault(self._start(sequence), []).append(sequence)

    def hold(self, request: Sequence) -> bool:
        """Returns whether to hold the request.

        The comparison with its holder is kept, so a held request is compared once.
        """
        if request.request.bypass_cache:
            return False
        holder = request.held_by
        if holder is not None and holder.state in _ADMITTED:
            if self._to_publish(holder, request.held_pages) >= MIN_PAGES:
                return True
            request.held_by = None
        for sibling in self._by_start.get(self._start(request), ()):
            common = self._common_pages(request, sibling)
            if self._to_publish(sibling, common) >= MIN_PAGES:
                request.held_by, request.held_pages = sibling, common
                return True
        return False

    def _to_publish(self, sibling: Sequence, num_pages: int) -> int:
        return num_pages - sibling.published_len // self._page_tokens

    def _start(self, sequence: Sequence) -> tuple[Namespace, bytes]:
        return sequence.namespace, sequence.tokens[: self._page_tokens].tobytes()

    def _common_pages(self, request: Sequence, sibling: Sequence) -> int:
        """Returns the number of leading pages that both have.

        The request's last token is left out: it is always computed.
        """
        low = 0
        high = min(len(request.tokens) - 1, len(sibling.tokens)) // self._page_tokens
        mine, theirs = request.packed_tokens(), sibling.packed_tokens()
        page_bytes = self._page_tokens * TOKEN_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if mine.startswith(theirs[low * page_bytes : middle * page_bytes], low * page_bytes):
                low = middle
            else:
                high = middle - 1
        return low
