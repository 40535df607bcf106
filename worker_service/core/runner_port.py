"""The port of a runner as Protocols: submit a batch, wait for its tokens.

Imports neither models nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from worker_service.core.batch import Batch
from worker_service.core.sampling_params import TokenLogprobs


class DeviceTimes(NamedTuple):
    """What the device itself measured of a launch, in seconds; `idle_s` is what passed since the launch before it."""

    busy_s: float
    idle_s: float


class LaunchTokens(NamedTuple):
    """One entry for each of the batch's `sampled` rows, in that order; logprobs are None for rows that did not ask."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class Completed(NamedTuple):
    """A launch's tokens; `times` is None where the device has no clock."""

    tokens: LaunchTokens
    times: DeviceTimes | None = None


class Submitted(Protocol):
    """A launch that the device works on, or has queued."""

    def wait(self) -> Completed:
        """Returns when the launch is complete; called once, from another thread than `submit`."""
        ...


class BatchRunner(Protocol):
    """Launches run one after another, in the order of their submission. `submit` is called from one thread."""

    def submit(self, batch: Batch) -> Submitted:
        """Starts a launch. Its `from_previous` names rows of the launch submitted before, also a failed one's."""
        ...

    def set_previous(self, token_ids: Seq[int]) -> None:
        """Sets the tokens that the next batch's `from_previous` names; after a launch that was run in parts."""
        ...
