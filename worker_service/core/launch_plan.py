"""How many tokens of each sequence the next launch computes: decode rows first, then chunks within the budget.

The same function predicts the coming launch (to ask for its pages in time) and makes it, so the two cannot disagree
about caps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import Sequence

UNLIMITED = 1 << 62
# With fewer decoding streams than this for each prompt that waits, prompts come first.
STREAMS_PER_PROMPT = 8


class Progress(NamedTuple):
    """A sequence's present or predicted state. `allocated_len` is the length in tokens that its pages hold."""

    sequence: Sequence
    computed: int
    length: int
    allocated_len: int


class Row(NamedTuple):
    """`num_tokens` tokens of a sequence from `first_token` on."""

    sequence: Sequence
    first_token: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.first_token + self.num_tokens


def chunk_len(first: int, remaining: int, budget: int, config: SchedulerConfig) -> int:
    """Returns how many tokens of a prompt to compute from `first` on; 0 when it has to wait for a larger token budget.

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
    return min(computed + 1 + config.num_speculative_tokens, config.max_model_len)


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
    running: Iterable[Progress], config: SchedulerConfig, *, within_pages: bool, num_waiting: int = 0
) -> Plan:
    """Returns the rows of a launch: decode rows, then prefill rows, each oldest first as `running` is.

    `within_pages`: no row goes beyond the pages of its sequence; False for the prediction, which is there to ask for
    the pages that are missing. `num_waiting`: prompts that are not admitted yet.
    """
    rows: list[Row] = []
    prefill: list[Progress] = []
    # As decode_need has it, which is a call for each of up to some hundred rows.
    accepted, longest = 1 + config.num_speculative_tokens, config.max_model_len
    for progress in running:
        sequence, computed, _, allocated = progress
        if computed < sequence.in_prefill_until:
            prefill.append(progress)
        elif not within_pages or allocated >= computed + accepted or allocated >= longest:
            rows.append(Row(sequence, computed, 1))
    num_decode = len(rows)
    budget = _prefill_budget(config, num_decode, len(prefill) + num_waiting)
    for sequence, computed, length, allocated in prefill:
        chunk = chunk_len(computed, length - computed, budget, config)
        is_cut = chunk < chunk_len(computed, length - computed, UNLIMITED, config)
        if within_pages:
            chunk = min(chunk, allocated - computed)
        if chunk > 0:
            rows.append(Row(sequence, computed, chunk))
            budget -= chunk
        # Younger prompts do not get the budget that an older one could not use, or the older one could starve.
        if is_cut:
            break
    return Plan(rows, num_decode)
