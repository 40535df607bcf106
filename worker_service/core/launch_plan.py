"""How many tokens of each sequence the next launch computes: decode rows first, then chunks within the budget.

The same function predicts the coming launch (to ask for its pages in time) and makes it, so the two cannot disagree
about caps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from session.words import GroupKind, GroupSpec
from worker_service.core.errors import InvalidField
from worker_service.core.sequence import Sequence

UNLIMITED = 1 << 62
# With fewer decoding streams than this for each prompt that waits, prompts come first.
STREAMS_PER_PROMPT = 8


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. `page_tokens` is the one in force.

    token_budget                  the most tokens of a launch, decode rows included
    mixed_prefill_tokens          the most tokens of prompts beside decode rows, while few prompts wait; 0 is off
    long_prefill_token_threshold  the most tokens of one sequence's chunk; 0 is off; idle without chunked_prefill
    reserve_pages                 pages that an admission must leave free or evictable while others run
    decode_lookahead              tokens that a decode row may accept beyond the first in one launch
    max_acquires                  requests asked for in one step, whose cached share is not known yet
    decode_ahead_tokens           tokens beyond the next launch's for which a decode row asks pages in time, so that it
                                  goes on while the cache service does not reply
    max_decode_ahead_tokens       the most of them while pages are free: half of the free pages, those held ahead
                                  included, are for running rows, in equal parts
    async_scheduling              whether a launch is planned and queued while the one before it runs
    """

    page_tokens: int
    groups: tuple[GroupSpec, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    token_budget: int = 2048
    max_num_seqs: int = 64
    max_waiting: int = 1024
    max_acquires: int = 8
    mixed_prefill_tokens: int = 0
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    reserve_pages: int = 0
    decode_lookahead: int = 0
    decode_ahead_tokens: int = 0
    max_decode_ahead_tokens: int = 0
    async_scheduling: bool = True

    def validate(self) -> None:
        for field in ("page_tokens", "max_model_len", "vocab_size", "max_num_seqs", "max_waiting", "max_acquires"):
            _require(field, getattr(self, field) >= 1, f"must be at least 1, not {getattr(self, field)}")
        for field in (
            "reserve_pages",
            "decode_lookahead",
            "decode_ahead_tokens",
            "max_decode_ahead_tokens",
            "mixed_prefill_tokens",
            "long_prefill_token_threshold",
        ):
            _require(field, getattr(self, field) >= 0, f"must be 0 or more, not {getattr(self, field)}")
        _require("groups", len(self.groups) >= 1, "a model has at least one group")
        _require(
            "token_budget",
            self.token_budget >= self.max_num_seqs,
            f"{self.token_budget} is less than one token for each of max_num_seqs = {self.max_num_seqs} sequences",
        )
        self._validate_chunks()

    def _validate_chunks(self) -> None:
        threshold = self.long_prefill_token_threshold
        _require(
            "long_prefill_token_threshold",
            threshold == 0 or self.page_tokens <= threshold <= self.max_model_len,
            f"{threshold} is not 0, nor from page_tokens = {self.page_tokens} to max_model_len = {self.max_model_len}",
        )
        _require(
            "token_budget",
            self.chunked_prefill or self.token_budget >= self.max_model_len,
            f"without chunked_prefill it must hold a whole prompt of max_model_len = {self.max_model_len} tokens",
        )

    @property
    def paged_groups(self) -> tuple[int, ...]:
        return tuple(index for index, group in enumerate(self.groups) if group.kind is not GroupKind.STATE)


def _require(field: str, holds: bool, reason: str) -> None:
    if not holds:
        raise InvalidField(field, reason)


class Progress(NamedTuple):
    """A sequence's present or predicted state. `room` is the length in tokens that its pages hold."""

    sequence: Sequence
    computed: int
    length: int
    room: int


class Row(NamedTuple):
    """`num_tokens` tokens of a sequence from `first_token` on."""

    sequence: Sequence
    first_token: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.first_token + self.num_tokens


def chunk_len(first: int, remaining: int, budget: int, config: SchedulerConfig) -> int:
    """Returns how many tokens of a prompt to compute from `first` on; 0 when it has to wait for more budget.

    A chunk that is not the last one ends on a page boundary when that leaves something of it: all that it computed can
    then be published.
    """
    if not config.chunked_prefill:
        return remaining if remaining <= budget else 0
    chunk = min(remaining, budget, config.long_prefill_token_threshold or UNLIMITED)
    if chunk == remaining:
        return chunk
    on_boundary = (first + chunk) // config.page_tokens * config.page_tokens - first
    return on_boundary if on_boundary > 0 else chunk


def first_chunk_limit(length: int, config: SchedulerConfig) -> int:
    """Returns the most tokens that the first launch of a sequence can compute, for any length of its cached prefix."""
    if not config.chunked_prefill:
        return length
    return min(length, config.token_budget, config.long_prefill_token_threshold or UNLIMITED)


def decode_need(computed: int, config: SchedulerConfig) -> int:
    """Returns the length for which a decode row needs pages: its token and those that it may accept beyond it."""
    return min(computed + 1 + config.decode_lookahead, config.max_model_len)


class Plan(NamedTuple):
    """Rows in the launch's order; the first `num_decode` are decode rows."""

    rows: list[Row]
    num_decode: int


def _prefill_budget(config: SchedulerConfig, num_decode: int, num_prompts: int) -> int:
    """Returns the tokens of prompts in one launch.

    Few prompts beside many streams come in small chunks, so that no stream waits for long: 64 rows of an 8B model take
    5.6 ms, with 256 tokens of a prompt 12 ms and with 2,048 of them 50 ms.
    """
    budget = config.token_budget - num_decode
    is_quiet = num_prompts * STREAMS_PER_PROMPT <= num_decode
    if config.mixed_prefill_tokens and config.chunked_prefill and is_quiet:
        return min(budget, config.mixed_prefill_tokens)
    return budget


def plan_launch(
    running: Iterable[Progress], config: SchedulerConfig, *, within_room: bool, num_waiting: int = 0
) -> Plan:
    """Returns the rows of a launch: decode rows, then prefill rows, each oldest first as `running` is.

    `within_room` is False for the prediction, which is there to ask for the pages that are missing. `num_waiting`:
    prompts that are not admitted yet.
    """
    rows: list[Row] = []
    prefill: list[Progress] = []
    # As decode_need has it, which is a call for each of up to some hundred rows.
    accepted, longest = 1 + config.decode_lookahead, config.max_model_len
    for progress in running:
        sequence, computed, _, room = progress
        if computed < sequence.in_prefill_until:
            prefill.append(progress)
        elif not within_room or room >= computed + accepted or room >= longest:
            rows.append(Row(sequence, computed, 1))
    num_decode = len(rows)
    budget = _prefill_budget(config, num_decode, len(prefill) + num_waiting)
    for sequence, computed, length, room in prefill:
        chunk = chunk_len(computed, length - computed, budget, config)
        is_cut = chunk < chunk_len(computed, length - computed, UNLIMITED, config)
        if within_room:
            chunk = min(chunk, room - computed)
        if chunk > 0:
            rows.append(Row(sequence, computed, chunk))
            budget -= chunk
        # Younger prompts do not get the budget that an older one could not use, or the older one could starve.
        if is_cut:
            break
    return Plan(rows, num_decode)
