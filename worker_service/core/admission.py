"""Admission: chooses the waiting requests for which the next step asks pages.

After a refusal for lack of pages the queue waits until something was freed. Then its head asks alone, and each
grant doubles how many ask at once: all requests behind a refused one are refused with it. The cache service keeps what
it refused, so that a prompt crosses the wire once (Acquire.kept_tokens).
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from session.limits import MAX_SNAPSHOT_BOUNDARIES
from session.messages import Acquire
from session.words import TOKEN_BYTES, GroupKind, SequenceId
from worker_service.core.holding import Siblings
from worker_service.core.launch_plan import UNLIMITED, first_chunk_limit
from worker_service.core.limits import BOUNDARY_BYTES, ITEM_BYTES, MessageBudget, Terms, name_bytes
from worker_service.core.queues import Queues
from worker_service.core.sequence import Sequence, State

# Waiting requests that are compared with running ones before it is their turn: 0.1 ms.
LOOKAHEAD = 64


class Admission:
    def __init__(self, terms: Terms, queues: Queues) -> None:
        self._terms = terms
        self._queues = queues
        self._has_states = any(group.kind is GroupKind.STATE for group in terms.config.groups)
        self._refused: Sequence | None = None  # the request that waits for pages; it blocks those behind it
        self._max_acquires = UNLIMITED  # of one step
        self.num_held = 0

    # -- results of earlier acquires --

    def granted(self) -> None:
        self._max_acquires = min(2 * self._max_acquires, UNLIMITED)

    def refused(self, sequence: Sequence) -> None:
        """There were no pages for it. Of several the first in the queue is remembered: it blocks all behind it."""
        self._max_acquires = 1
        former = self._refused
        if former is None or former.state is not State.WAITING or sequence.queue_order < former.queue_order:
            self._refused = sequence

    def one_by_one(self) -> None:
        self._max_acquires = 1

    def freed(self) -> None:
        self._refused = None

    @property
    def lacks_pages(self) -> bool:
        """Returns whether a request waits for pages that it was refused."""
        return self._refused is not None and self._refused.state is State.WAITING

    def keeps(self, num_tokens: int) -> int:
        """Returns how many leading tokens of a refused or preempted sequence the cache service keeps.

        All, or 0 beyond its limit.
        """
        return num_tokens if num_tokens * TOKEN_BYTES <= self._terms.limits.max_kept_bytes else 0

    # -- the next step --

    def acquires(self, budget: MessageBudget) -> list[tuple[Sequence, Acquire]]:
        """Returns acquires for the head of the queue, and takes their sequences out of it."""
        config, leased = self._terms.config, self._queues.leased
        if not self._may_admit():
            return []
        chosen = self._choose(min(config.max_acquires, self._max_acquires, config.max_num_seqs - len(leased)), budget)
        self._queues.take(chosen)
        return [
            (sequence, self._acquire(sequence, alone=not (leased or number))) for number, sequence in enumerate(chosen)
        ]

    def _may_admit(self) -> bool:
        """Returns False while a running sequence lacks pages, or while admitted prompts fill the next launch."""
        threshold = self._terms.config.long_prefill_token_threshold or UNLIMITED
        backlog = 0
        for sequence in self._queues.leased:
            if sequence.num_refused_extends:
                return False
            backlog += min(max(sequence.in_prefill_until - sequence.launched_len, 0), threshold)
        return backlog < self._terms.config.token_budget

    def _choose(self, limit: int, budget: MessageBudget) -> list[Sequence]:
        """Returns requests from the head on.

        A held one is passed over; a refused one blocks all behind it, or it would starve.
        """
        siblings = self._siblings()
        chosen: list[Sequence] = []
        num_held = 0
        for sequence in self._queues.waiting:
            if len(chosen) >= limit:
                break
            holder = siblings.holder_of(sequence)
            if holder is not None:
                siblings.note_branch(sequence, holder)
                num_held += 1
            elif sequence is self._refused or not budget.take(Acquire, _acquire_bytes(sequence)):
                break
            else:
                chosen.append(sequence)
                siblings.admit(sequence)
        self.num_held = num_held
        self._note_branches(siblings, {sequence.sequence_id for sequence in chosen})
        return chosen

    def _siblings(self) -> Siblings:
        siblings = Siblings(self._terms.config.page_tokens, has_states=self._has_states)
        for sequence in self._queues.leased:
            siblings.admit(sequence)
        return siblings

    def note_branches(self) -> None:
        """Tells running sequences where the next requests part from them, before their extends are built."""
        if self._has_states and self._queues.waiting:
            self._note_branches(self._siblings(), frozenset())

    def _note_branches(self, siblings: Siblings, chosen: Collection[SequenceId]) -> None:
        if self._has_states:
            for sequence in islice(self._queues.waiting, LOOKAHEAD):
                holder = siblings.holder_of(sequence) if sequence.sequence_id not in chosen else None
                if holder is not None:
                    siblings.note_branch(sequence, holder)

    def _acquire(self, sequence: Sequence, *, alone: bool) -> Acquire:
        """A sequence that runs alone asks for no reserve: with one, the longest prompt would never be admitted.

        Beside others it asks for no more than the pool has beyond its own pages: more would never fit, and fail it.
        """
        config = self._terms.config
        pages = -(-len(sequence.tokens) // config.page_tokens)
        full = (spec.num_pages for spec in config.groups if spec.kind is GroupKind.FULL)
        spare = max(min(full, default=pages) - pages, 0)
        return Acquire(
            sequence.sequence_id,
            sequence.namespace,
            sequence.packed_tokens()[sequence.kept_prompt_len * TOKEN_BYTES :],
            0 if alone else min(config.reserve_pages, spare),
            first_chunk_limit(len(sequence.tokens), config),
            sequence.request.priority,
            sequence.kept_prompt_len,
            sequence.request.bypass_cache,
            sequence.leave_at(),
        )


def _acquire_bytes(sequence: Sequence) -> int:
    num_sent = len(sequence.tokens) - sequence.kept_prompt_len
    boundaries = BOUNDARY_BYTES * MAX_SNAPSHOT_BOUNDARIES
    return ITEM_BYTES + boundaries + name_bytes(sequence.namespace) + TOKEN_BYTES * num_sent
