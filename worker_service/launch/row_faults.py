"""Runs a batch so that a row that cannot be computed fails alone: after an error the rows are run in halves.

Running a row again writes the same keys and values to the same slots, so the other rows get the tokens that they would
have got without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from worker_service.core.batch import Batch
from worker_service.core.batch_part import part_of
from worker_service.core.errors import DeviceLost
from worker_service.core.sequence import TokenLogprobs

# Launches for one batch, the first one included. One bad row of 64 takes 13, two take up to 25.
MAX_RUNS = 32


class LaunchTokens(Protocol):
    """One entry for each sampled row of the batch."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[TokenLogprobs | None, ...]: ...


class RowResults(NamedTuple):
    """`token_ids` and `logprobs` have an entry for each sampled row; that of a failed row means nothing.

    `errors` has what each failed row failed with, by its index in the batch. `first_error` is what the whole batch
    raised; None for a batch that was run once.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    errors: Mapping[int, Exception]
    first_error: Exception | None


def run_rows(run: Callable[[Batch], LaunchTokens], batch: Batch, *, may_repeat: bool = True) -> RowResults:
    """Returns the rows' results after at most MAX_RUNS calls of `run`. Raises DeviceLost only.

    Args:
        may_repeat: False when a row cannot be computed twice, since it changes a state in place: an error then fails
            every row.
    """
    tokens: dict[int, tuple[int, TokenLogprobs | None]] = {}
    errors: dict[int, Exception] = {}
    parts = [(0, batch.num_seqs)]
    first_error: Exception | None = None
    num_runs = 0
    while parts:
        first, end = parts.pop()
        whole = end - first == batch.num_seqs
        part = batch if whole else part_of(batch, first, end)
        try:
            num_runs += 1
            result = run(part)
        except DeviceLost:
            raise
        except Exception as error:  # any error of a forward pass concerns its own rows only
            first_error = first_error or error
            if end - first > 1 and may_repeat and num_runs + len(parts) + 2 <= MAX_RUNS:
                middle = (first + end) // 2
                parts += [(middle, end), (first, middle)]
            else:
                errors.update(dict.fromkeys(range(first, end), error))
            continue
        for entry, token, logprobs in zip(part.sampled, result.token_ids, result.logprobs, strict=True):
            tokens[first + entry.row] = (token, logprobs)
    found = [tokens.get(entry.row, (0, None)) for entry in batch.sampled]
    return RowResults(tuple(token for token, _ in found), tuple(item for _, item in found), errors, first_error)
