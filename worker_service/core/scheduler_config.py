"""What the scheduler is configured with, and which values are valid."""

from __future__ import annotations

from dataclasses import dataclass

from session.words import GroupKind, GroupSpec
from worker_service.core.errors import InvalidField


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. `page_tokens` is the one in force.

    token_budget                  the most tokens of a launch, decode rows included
    mixed_prefill_tokens          the most tokens of prompts beside decode rows, while few prompts wait; 0 is off
    long_prefill_token_threshold  the most tokens of one sequence's chunk; 0 is off; idle without chunked_prefill
    reserve_pages                 pages that an admission must leave free or evictable while others run
    num_speculative_tokens        draft tokens that a decode row may accept beyond its own token in one launch. A worker
                                  has no setting for it, as no runner drafts tokens: only tests of the scheduler give it
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
    num_speculative_tokens: int = 0
    decode_ahead_tokens: int = 0
    max_decode_ahead_tokens: int = 0
    async_scheduling: bool = True

    def validate(self) -> None:
        for field in ("page_tokens", "max_model_len", "vocab_size", "max_num_seqs", "max_waiting", "max_acquires"):
            _require(field, getattr(self, field) >= 1, f"must be at least 1, not {getattr(self, field)}")
        for field in (
            "reserve_pages",
            "num_speculative_tokens",
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
