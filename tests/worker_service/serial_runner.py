"""A runner for tests that computes a launch when it is submitted."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from worker_service.core.batch import Batch
from worker_service.core.batch_part import with_known_tokens
from worker_service.core.runner_port import Completed, LaunchTokens, Submitted


class SerialRunner:
    """A BatchRunner whose launches are complete when they are submitted, made from a function that runs one."""

    def __init__(self, run: Callable[[Batch], LaunchTokens]) -> None:
        self._run = run
        self._previous: Seq[int] = ()

    def submit(self, batch: Batch) -> Submitted:
        tokens = self._run(with_known_tokens(batch, self._previous))
        self._previous = tokens.token_ids
        return _Ready(tokens)

    def set_previous(self, token_ids: Seq[int]) -> None:
        self._previous = token_ids


class _Ready(NamedTuple):
    tokens: LaunchTokens

    def wait(self) -> Completed:
        return Completed(self.tokens)
