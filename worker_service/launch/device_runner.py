"""A runner that distinguishes one launch's error from the loss of the device, after which every CUDA call fails."""

from __future__ import annotations

import traceback

import torch

from worker_service.core.batch import Batch
from worker_service.core.errors import DeviceLost
from worker_service.launch.launcher import BatchRunner
from worker_service.launch.row_faults import LaunchTokens


class DeviceRunner:
    """Runs batches on `device`. After an error on CUDA it checks whether the device still works."""

    def __init__(self, runner: BatchRunner, device: torch.device) -> None:
        self._runner = runner
        self._device = device

    def run(self, batch: Batch) -> LaunchTokens:
        """Raises DeviceLost, or what the launch raised; after an OutOfMemoryError what it held is free again."""
        try:
            return self._runner.run(batch)
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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
