"""Leases that a new state of the cache service is to take over: which ones wait, and the Adopt of each.

While any waits, a step carries adopts only: an acquire or an extend could be granted pages that are yet to be adopted.

    RUNNING --- the state was lost ---> ADOPTING --- granted ---> RUNNING
                                            |------ refused ---> WAITING, computed again
                                            '------ this state was given up as well ---> RUNNING
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from session.messages import Adopt, Grant
from session.words import NO_PAGE, GroupKind, GroupPages
from worker_service.core.limits import MessageBudget, Terms, adopt_bytes
from worker_service.core.queues import Queues
from worker_service.core.sequence import Sequence, State, place_pages


class Adoptions:
    def __init__(self, terms: Terms, queues: Queues) -> None:
        self._terms = terms
        self._queues = queues
        self._pending: list[Sequence] = []  # oldest first

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Starts over with these sequences. The cache service gets all their tokens, and publishes what is computed."""
        self._pending = list(sequences)
        for sequence in self._pending:
            sequence.state = State.ADOPTING
            sequence.leased_len = len(sequence.tokens)
            sequence.published_len = sequence.granted_len = sequence.launched_len = sequence.computed_len
            sequence.num_refused_extends = 0
            sequence.restore = sequence.snapshots = sequence.written_snapshots = ()

    def suspend(self) -> None:
        """Lets those that wait run on: the pages are theirs as long as steps carry nothing but adopts."""
        self._pending = []
        for sequence in self._queues.leased:
            if sequence.state is State.ADOPTING:
                sequence.state = State.RUNNING

    def take(self, budget: MessageBudget) -> list[tuple[Sequence, Adopt]]:
        """Returns adopts for one step, at least one while any sequence waits; aborted ones end here."""
        taken: list[tuple[Sequence, Adopt]] = []
        pages_left = self._terms.limits.max_adopt_pages
        while self._pending:
            sequence = self._pending[0]
            if sequence.state is State.FINISHED:
                del self._pending[0]
                self._queues.departures.pop(sequence.sequence_id, None)
                self._queues.end_lease(sequence)
                continue
            adopt = self._adopt(sequence)
            num_pages = sum(len(sequence.tables[pages.group]) for pages in adopt.tables)
            fits = num_pages <= pages_left and budget.take(Adopt, adopt_bytes(adopt))
            if taken and not fits:
                break
            pages_left -= num_pages
            taken.append((sequence, adopt))
            del self._pending[0]
        return taken

    def _adopt(self, sequence: Sequence) -> Adopt:
        return Adopt(
            sequence.sequence_id,
            sequence.namespace,
            sequence.tokens.tobytes(),
            sequence.computed_len,
            tuple(self._table(sequence, group) for group in self._terms.config.paged_groups),
            sequence.working,
            sequence.rolling,
            sequence.request.priority,
            sequence.request.bypass_cache,
        )

    def _table(self, sequence: Sequence, group: int) -> GroupPages:
        """Leaves out a window's pages that are no longer read: they may be another sequence's by now."""
        config = self._terms.config
        spec, table = config.groups[group], sequence.tables[group]
        num_left = 0
        if spec.kind is GroupKind.WINDOW:
            first_read = max(sequence.computed_len - (spec.window_tokens - 1), 0)
            num_left = min(first_read // config.page_tokens, len(table))
        named = array("i", (NO_PAGE,)) * num_left + table[num_left:]
        return GroupPages(group, 0, named.tobytes())


def take_over(sequence: Sequence, grant: Grant) -> None:
    """Replaces the sequence's tables by the grant's: of a page that two sequences had computed one copy is left."""
    for pages in grant.tables:
        del sequence.tables[pages.group][:]
    place_pages(sequence.tables, grant.tables)
    sequence.working, sequence.rolling, sequence.snapshots = grant.working, grant.rolling, grant.snapshots
    if sequence.state is State.ADOPTING:
        sequence.state = State.RUNNING
