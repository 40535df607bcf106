"""`python -m tests.worker_service.faulty_worker`: a worker whose device fails at the prompt HOSTILE.

STEMCACHE_TEST_FAULT says how:
    assert   a real device-side assert
    dead     the same as a CPU can play it: an error, and a device that is silent from then on
    hang     the launch never returns
    memory   whatever the prompts: never enough memory for more than two rows at once
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

from worker_service.__main__ import main
from worker_service.core.batch import Batch
from worker_service.launch.device_runner import DeviceRunner
from worker_service.model.runner import Runner, RunningLaunch

HOSTILE = (40, 13, 41)
FAULT_VARIABLE = "STEMCACHE_TEST_FAULT"

_submit = Runner.submit
_is_dead = threading.Event()


def _faulty_submit(self: Runner, batch: Batch) -> RunningLaunch:
    fault = os.environ[FAULT_VARIABLE]
    if fault == "memory" and batch.num_seqs > 2:
        if torch.cuda.is_available():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if fault != "memory" and _is_hostile(batch):
        if fault == "hang":
            time.sleep(3600)
        if fault == "dead":
            _is_dead.set()
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
        torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda"))
    return _submit(self, batch)


def _is_hostile(batch: Batch) -> bool:
    tokens = batch.token_ids
    return any(tuple(tokens[at : at + len(HOSTILE)]) == HOSTILE for at in range(len(tokens)))


def _synchronize(self: DeviceRunner) -> None:
    if _is_dead.is_set():
        raise RuntimeError("CUDA error: device-side assert triggered")


if __name__ == "__main__":
    Runner.submit = _faulty_submit  # type: ignore[method-assign]
    if os.environ[FAULT_VARIABLE] == "dead":
        DeviceRunner._synchronize = _synchronize  # type: ignore[method-assign]
    sys.exit(main())
