"""Runs a batch that failed again in halves, so that a row that cannot be computed fails alone.

Running a row again writes the same keys and values to the same slots, so the other rows get the tokens that they would
have got without it. Errors that show only when results are awaited fail every row: launcher.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from worker_service.core.batch import Batch
from worker_service.core.batch_part import part_of
from worker_service.core.errors import DeviceLost
from worker_service.core.runner_port import LaunchTokens
from worker_service.core.sampling_params import TokenLogprobs

# Launches for one batch, the first one included. One bad row of 64 takes 13, two take up to 25.
MAX_RUNS = 32


class RowResults(NamedTuple):
    """`token_ids` and `logprobs` have an entry for each sampled row; that of a failed row means nothing.

    `errors` has what each failed row failed with, by its index in the batch. `first_error` is what the whole batch
    raised; None for a batch that was run once.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    errors: Mapping[int, Exception]
    first_error: Exception | None


def run_in_parts(
    run: Callable[[Batch], LaunchTokens], batch: Batch, error: Exception, *, may_repeat: bool = True
) -> RowResults:
    """Returns the rows' results, after the whole batch raised `error` and at most MAX_RUNS - 1 calls of `run`.

    Raises DeviceLost only.

    Args:
        may_repeat: False when a row cannot be computed twice, since it changes a state in place: the error then fails
            every row.
    """
    tokens: dict[int, tuple[int, TokenLogprobs | None]] = {}
    errors: dict[int, Exception] = {}
    num_runs = 1
    parts: list[tuple[int, int]] = []

    def failed(first: int, end: int, error: Exception) -> None:
        if end - first > 1 and may_repeat and num_runs + len(parts) + 2 <= MAX_RUNS:
            middle = (first + end) // 2
            parts.extend(((middle, end), (first, middle)))
        else:
            errors.update(dict.fromkeys(range(first, end), error))

    failed(0, batch.num_seqs, error)
    while parts:
        first, end = parts.pop()
        part = part_of(batch, first, end)
        try:
            num_runs += 1
            result = run(part)
        except DeviceLost:
            raise
        except Exception as part_error:  # any error of a forward pass concerns its own rows only
            failed(first, end, part_error)
            continue
        for entry, token, logprobs in zip(part.sampled, result.token_ids, result.logprobs, strict=True):
            tokens[first + entry.row] = (token, logprobs)
    found = [tokens.get(entry.row, (0, None)) for entry in batch.sampled]
    return RowResults(tuple(token for token, _ in found), tuple(item for _, item in found), errors, error)
