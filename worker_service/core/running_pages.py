"""Pages of running sequences: which to ask for before a launch needs them, and which to give back.

    |## computed ##|# in flight #|# next launch #|........... held ahead ...........|
                                    needed         decode_ahead_tokens, or more while pages are free

With pages ahead a decode row goes on while the cache service does not reply. They are given back while another sequence
lacks pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from session.limits import MAX_SNAPSHOT_BOUNDARIES
from session.messages import Extend, Shrink
from worker_service.core.asked import Ask, Asked
from worker_service.core.launch_plan import Plan, decode_need, plan_launch
from worker_service.core.limits import BOUNDARY_BYTES, ITEM_BYTES, MessageBudget, Terms
from worker_service.core.prediction import Prediction
from worker_service.core.queues import Queues
from worker_service.core.restoration import Restoration
from worker_service.core.sequence import Sequence

# Steps without extends beyond the need after one was refused.
AHEAD_PAUSE_STEPS = 32


class RunningPages:
    def __init__(self, terms: Terms, queues: Queues, prediction: Prediction, restoration: Restoration) -> None:
        self._terms = terms
        self._queues = queues
        self._prediction = prediction
        self._restoration = restoration
        config = terms.config
        self._has_states = len(config.paged_groups) < len(config.groups)
        self._paged = config.paged_groups
        self._page_tokens = config.page_tokens
        self._free_pages: tuple[int, ...] = ()  # by group, after the last step that got a reply
        self._step_id = 0
        self._ahead_after_step = 0
        self._lacks_pages = False

    def reset(self) -> None:
        """Forgets what the cache service said: it has a new state for this worker."""
        self._ahead_after_step = 0
        self._free_pages = ()

    def replied(self, free_pages: tuple[int, ...]) -> None:
        self._free_pages = free_pages

    def refused_ahead(self) -> None:
        """Notes that no pages are free to hold ahead: for some steps rows ask for what they need only."""
        self._ahead_after_step = self._step_id + AHEAD_PAUSE_STEPS

    def begin_step(self, step_id: int, *, lacks_pages: bool) -> None:
        """Begins a step. `lacks_pages`: a request waits for pages that it was refused."""
        self._step_id = step_id
        self._lacks_pages = lacks_pages

    def shrinks(self, budget: MessageBudget) -> tuple[Shrink, ...]:
        """Gives back the pages ahead of rows that decode, but for `decode_ahead_tokens`, while a sequence lacks pages.

        Launches in flight write to none of them, and the next one is planned without them.
        """
        is_short = self._lacks_pages or any(one.num_refused_extends for one in self._queues.leased)
        if not self._terms.may_shrink or not is_short:
            return ()
        shrinks = []
        for sequence, computed, length, _ in self._prediction.progress():
            if computed >= sequence.in_prefill_until:
                kept = max(decode_need(computed, self._terms.config), length, sequence.written_len)
                num_pages = -(-(kept + self._terms.config.decode_ahead_tokens) // self._page_tokens)
                kept = num_pages * self._page_tokens
                if kept < self._prediction.allocated_len(sequence) and budget.take(Shrink):
                    sequence.drop_pages(num_pages)
                    shrinks.append(Shrink(sequence.sequence_id, kept))
        return tuple(shrinks)

    def extends(self, budget: MessageBudget) -> list[Asked]:
        """Returns what to ask, oldest sequence first, but those that missed a launch before all others."""
        num_waiting = len(self._queues.waiting)
        progress = self._prediction.progress()
        plan = plan_launch(progress, self._terms.config, within_pages=False, num_waiting=num_waiting)
        needs = list(self._needs(plan))
        needs.sort(key=lambda asked: (asked.sequence.num_refused_extends == 0, asked.sequence.queue_order))
        return [asked for asked in needs if budget.take(Extend, _extend_bytes(asked.sequence))]

    def _needs(self, plan: Plan) -> Iterator[Asked]:
        """Yields what to ask for rows that lack pages, or soon will."""
        config, allocated_len = self._terms.config, self._prediction.allocated_len
        allocated_lens = [allocated_len(row.sequence) for row in plan.rows]
        ahead = self._ahead_tokens(plan, allocated_lens)
        # Ask once a quarter of it, or a page, is used up: not at each token.
        refill = max(ahead - max(ahead // 4, min(ahead // 2, self._page_tokens)), 0)
        for index, (sequence, first, num_tokens) in enumerate(plan.rows):
            allocated = allocated_lens[index]
            if index >= plan.num_decode:
                if first + num_tokens > allocated:
                    yield Asked(sequence, Ask.EXTEND, first + num_tokens)
                continue
            need = decode_need(first, config)
            wanted = min(need + ahead, max(sequence.end_len, need), config.max_model_len)
            if need > allocated or min(need + refill, wanted) > allocated:
                yield Asked(sequence, Ask.EXTEND, wanted, is_ahead=wanted > need)

    def _ahead_tokens(self, plan: Plan, allocated_lens: list[int]) -> int:
        """Returns for how many tokens beyond its need a decode row asks pages.

        Half of what is free or held ahead is for the rows, in equal parts: the other half is there for the prompts to
        come, so that nothing is evicted for pages ahead. In a full pool, and while a request waits for pages, it is
        `decode_ahead_tokens`.
        """
        config = self._terms.config
        # An extend also reserves snapshot slots, which are too few for boundaries that may not be reached.
        if self._has_states or self._step_id <= self._ahead_after_step:
            return 0
        least, num_decode = config.decode_ahead_tokens, plan.num_decode
        if not self._free_pages or not num_decode or self._lacks_pages or self._restoration.is_pending:
            return least
        held = sum(allocated_lens[:num_decode]) - sum([row.end for row in plan.rows[:num_decode]])
        spare = min([self._free_pages[group] for group in self._paged]) * self._page_tokens + held
        return max(least, min(spare // (2 * num_decode), config.max_decode_ahead_tokens))


def _extend_bytes(sequence: Sequence) -> int:
    return ITEM_BYTES + BOUNDARY_BYTES * min(len(sequence.branches), MAX_SNAPSHOT_BOUNDARIES)
