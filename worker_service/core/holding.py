"""Decides which waiting requests should wait for a sibling that is about to publish what they need.

sibling   |#### published ####|.... yet to publish ....|   still prefilling or fetching
request   |######## common prefix ########|~~~~~~~~~~~~~
                              '-- MIN_TOKENS, or two smaller pages: hold --'

A recurrent state can be resumed from at snapshots only, so where there are STATE groups the sibling is told of the
branch: it leaves a snapshot where the request parts from it. The request is then held until the last common page is
published: one page earlier there may be no snapshot at all.
"""

from __future__ import annotations

from session.words import TOKEN_BYTES, Namespace
from worker_service.core.sequence import Sequence, State

# A held request begins a launch later. For one page of fewer tokens that does not pay: they are few beside the others
# of a launch. A page of more is work that each of N siblings would do again: models with states have pages of 64
# tokens, DeepSeek V4 of 128.
MIN_TOKENS = 32
MIN_SMALL_PAGES = 2

_ADMITTED = (State.ACQUIRING, State.FETCHING, State.RUNNING)


class Siblings:
    """Admitted sequences that have yet to publish, by namespace and first page."""

    def __init__(self, page_tokens: int, *, has_states: bool = False) -> None:
        self._page_tokens = page_tokens
        self._min_pages = 1 if page_tokens >= MIN_TOKENS else MIN_SMALL_PAGES
        self._has_states = has_states
        self._by_start: dict[tuple[Namespace, bytes], list[Sequence]] = {}

    def admit(self, sequence: Sequence) -> None:
        if sequence.request.bypass_cache:
            return
        if self._to_publish(sequence, len(sequence.tokens) // self._page_tokens) >= self._min_pages:
            self._by_start.setdefault(self._start(sequence), []).append(sequence)

    def holder_of(self, request: Sequence) -> Sequence | None:
        """Returns the sibling that the request should wait for; None: it need not wait.

        The comparison is kept with the request, so a held one is compared once.
        """
        if request.request.bypass_cache:
            return None
        holder = request.held_by
        if holder is not None and holder.state in _ADMITTED:
            if self._is_worth_waiting(holder, request.held_pages):
                return holder
            request.held_by = None
        for sibling in self._by_start.get(self._start(request), ()):
            common = self._common_pages(request, sibling)
            if self._is_worth_waiting(sibling, common):
                request.held_by, request.held_pages = sibling, common
                return sibling
        return None

    def note_branch(self, request: Sequence, holder: Sequence) -> None:
        """Tells the holder of the request where they part, if it leaves snapshots."""
        if self._has_states:
            holder.branches.add(request.held_pages * self._page_tokens)

    def _is_worth_waiting(self, sibling: Sequence, common: int) -> bool:
        num_pages = self._to_publish(sibling, common)
        return num_pages >= self._min_pages or (self._has_states and num_pages > 0 and common >= self._min_pages)

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
