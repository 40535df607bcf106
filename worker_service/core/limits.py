"""The configuration in force: the worker's own, within the limits of the cache service.

Sizes of messages are upper estimates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from session.limits import SessionLimits
from session.messages import Adopt
from session.protocol import SHRINK
from session.words import PAGE_ID_BYTES, TOKEN_BYTES, Namespace
from worker_service.core.errors import InvalidField
from worker_service.core.launch_plan import UNLIMITED
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import Sequence

MAX_UTF8_BYTES = 4
# More than any item needs beside its names, tokens and page ids.
ITEM_BYTES = 128
SNAPSHOT_BYTES = 32
BOUNDARY_BYTES = 6

NO_LIMITS = SessionLimits(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, 0, 0)


class TooLong(NamedTuple):
    """Why a sequence cannot be served within the limits in force."""

    field: str
    reason: str


class Terms:
    """`config` is the configuration in force; it changes with each Welcome."""

    def __init__(self, configured: SchedulerConfig) -> None:
        self._configured = configured
        self.config = configured
        self.limits = NO_LIMITS
        self.may_shrink = False  # whether the cache service takes back pages that are held ahead

    def take(self, limits: SessionLimits, capabilities: Container[str]) -> None:
        self.limits = limits
        self.may_shrink = SHRINK in capabilities
        self.config = replace(
            self._configured,
            max_model_len=min(self._configured.max_model_len, limits.max_sequence_tokens, self._most_sent()),
            max_num_seqs=min(self._configured.max_num_seqs, limits.max_live_sequences),
        )

    def _most_sent(self) -> int:
        """Returns the longest sequence, in tokens, whose adopt with all its tables fits into half a message."""
        config, groups = self._configured, self._configured.groups
        fixed = ITEM_BYTES * (1 + len(groups)) + 2 * SNAPSHOT_BYTES * len(groups)
        fixed += 3 * MAX_UTF8_BYTES * self.limits.max_name_chars + PAGE_ID_BYTES * len(groups)
        num_bytes = max(self._half() - fixed, 0)
        return num_bytes * config.page_tokens // (TOKEN_BYTES * config.page_tokens + PAGE_ID_BYTES * len(groups))

    def _half(self) -> int:
        """Half of a message is for acquires and adopts, half for the rest, so that neither takes all of it."""
        return self.limits.max_message_bytes // 2

    def message_budget(self) -> MessageBudget:
        """Returns the budget of half a message."""
        return MessageBudget(self.limits.max_step_items, self._half())

    def excess(self, sequence: Sequence) -> TooLong | None:
        """Returns why the sequence's names or its prompt are beyond the limits; None when they are within them."""
        for field in ("adapter", "salt"):
            num_chars = len(getattr(sequence.namespace, field))
            if num_chars > self.limits.max_name_chars:
                limit = f"max_name_chars = {self.limits.max_name_chars} of the cache service"
                return TooLong(field, f"has {num_chars} characters, more than {limit}")
        if sequence.prompt_len >= self.config.max_model_len:
            return TooLong("prompt", f"{sequence.prompt_len} tokens leave no room in {self._longest()}")
        return None

    def is_full(self, sequence: Sequence) -> bool:
        """Returns whether no token fits behind those that the sequence has."""
        return len(sequence.tokens) >= self.config.max_model_len

    def _longest(self) -> str:
        most = self.config.max_model_len
        if most == self._configured.max_model_len:
            return f"max_model_len = {most}"
        if most == self.limits.max_sequence_tokens:
            return f"max_sequence_tokens = {most} of the cache service"
        return f"the {most} tokens that max_message_bytes = {self.limits.max_message_bytes} of the cache service holds"

    def check(self, sequence: Sequence) -> None:
        """Raises InvalidField when the sequence is beyond the limits."""
        excess = self.excess(sequence)
        if excess is not None:
            raise InvalidField(excess.field, excess.reason)


class MessageBudget:
    """What is left of half a message: items of each kind, and bytes.

    Any single item fits: larger requests were refused when they were submitted.
    """

    def __init__(self, max_items: int, num_bytes: int) -> None:
        self._max_items = max_items
        self.num_bytes = num_bytes  # that are left
        self._num_items: Counter[type] = Counter()

    def take(self, kind: type, num_bytes: int = ITEM_BYTES) -> bool:
        """Counts one item in and returns True; returns False, and changes nothing, when it does not fit."""
        if self._num_items[kind] >= self._max_items or num_bytes > self.num_bytes:
            return False
        self._num_items[kind] += 1
        self.num_bytes -= num_bytes
        return True

    def take_bytes(self, num_bytes: int) -> bool:
        """Counts in more of an item that was taken; returns False, and changes nothing, when it does not fit."""
        if num_bytes > self.num_bytes:
            return False
        self.num_bytes -= num_bytes
        return True


def name_bytes(namespace: Namespace) -> int:
    return MAX_UTF8_BYTES * sum(map(len, namespace))


def adopt_bytes(adopt: Adopt) -> int:
    num_pages = sum(len(pages.page_ids) for pages in adopt.tables)
    slots = len(adopt.working) + len(adopt.rolling)
    fixed = ITEM_BYTES * (1 + len(adopt.tables)) + SNAPSHOT_BYTES * slots
    return fixed + name_bytes(adopt.namespace) + len(adopt.tokens) + num_pages
