"""A runner that distinguishes one launch's error from the loss of the device, after which every CUDA call fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import torch

from worker_service.core.batch import Batch
from worker_service.core.errors import DeviceLost
from worker_service.core.runner_port import BatchRunner, Completed, Submitted


class DeviceRunner:
    """Runs batches on `device`. After an error on CUDA it checks whether the device still works.

    `submit` and the `wait` of what it returns raise DeviceLost, or what the launch raised; after an OutOfMemoryError
    what the launch held is free again.
    """

    def __init__(self, runner: BatchRunner, device: torch.device) -> None:
        self._runner = runner
        self._device = device

    def submit(self, batch: Batch) -> Submitted:
        with self.checked():
            return _Checked(self, self._runner.submit(batch))

    def set_previous(self, token_ids: Seq[int]) -> None:
        with self.checked():
            self._runner.set_previous(token_ids)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Turns any error after which the device does not answer any more into a DeviceLost."""
        try:
            yield
        except Exception as error:
            # torch.AcceleratorError is not the only sign: matrix products and Triton launches raise RuntimeError.
            self._require_alive(error)
            if isinstance(error, torch.OutOfMemoryError):
                # The frames of the failed launch hold its tensors.
                traceback.clear_frames(error.__traceback__)
                self._empty_cache()
            raise

    def _require_alive(self, error: Exception) -> None:
        try:
            self._synchronize()
        except Exception as lost:
            raise DeviceLost(f"{_first_line(error)}; then the device: {_first_line(lost)}") from error

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Checked:
    def __init__(self, runner: DeviceRunner, submitted: Submitted) -> None:
        self._runner = runner
        self._submitted = submitted

    def wait(self) -> Completed:
        with self._runner.checked():
            return self._submitted.wait()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
