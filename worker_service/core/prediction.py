"""What running sequences will have computed once the launches in flight have ended, and which length their pages hold.

The next launch is planned from it, and so are the extends for the launch after that one.
"""

from __future__ import annotations

from collections.abc import Iterator

from session.words import GroupKind
from worker_service.core.launch_plan import UNLIMITED, Progress
from worker_service.core.limits import Terms
from worker_service.core.queues import Queues
from worker_service.core.sequence import Sequence, State


class Prediction:
    def __init__(self, terms: Terms, queues: Queues) -> None:
        self._terms = terms
        self._queues = queues
        config = terms.config
        self._only_full = all(group.kind is GroupKind.FULL for group in config.groups)
        self._paged = config.paged_groups
        self._page_tokens = config.page_tokens

    def progress(self) -> Iterator[Progress]:
        """Yields each running sequence's state after the launches in flight, oldest first.

        A sequence whose pending token is its last one by length is left out.
        """
        config, running = self._terms.config, State.RUNNING
        longest, page_tokens = config.max_model_len, self._page_tokens
        is_plain = self._only_full and len(config.groups) == 1
        for sequence in self._queues.leased:
            if sequence.state is not running:
                continue
            computed, num_pending = sequence.launched_len, sequence.num_pending
            length = len(sequence.tokens) + num_pending
            if num_pending:
                if length >= sequence.end_len or length >= longest:
                    continue
                computed += config.num_speculative_tokens
                length = computed + 1
            allocated_len = len(sequence.tables[0]) * page_tokens if is_plain else self.allocated_len(sequence)
            yield Progress(sequence, computed, length, allocated_len)

    def allocated_len(self, sequence: Sequence) -> int:
        """Returns the length in tokens that the sequence's pages hold, in the group that has fewest.

        With WINDOW or STATE groups a prompt goes no further than was asked: their pages are granted chunk by chunk.
        """
        tables, page_tokens = sequence.tables, self._page_tokens
        if self._only_full and len(tables) == 1:
            return len(tables[0]) * page_tokens
        pages = min([len(tables[group]) for group in self._paged], default=UNLIMITED)
        if not self._only_full and sequence.launched_len < sequence.in_prefill_until:
            return min(pages * page_tokens, sequence.granted_len)
        return pages * page_tokens
