"""A worker that does not fit into its device's memory when it starts: one line that names the settings."""

from __future__ import annotations

import pytest
import torch

from worker_service import __main__ as command
from worker_service import compute
from worker_service.config import WorkerConfig


def test_too_little_memory_at_the_start_names_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(config: WorkerConfig) -> compute.Compute:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of ...")

    monkeypatch.setattr(compute, "_prepare", too_large)
    monkeypatch.setattr(command, "set_up_logging", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["worker_service", "--model", "m"])
    assert command.main() == command.USAGE_ERROR
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("worker_service: error: memory_fraction, pool_mb, token_budget, max_num_seqs:")
    assert last.endswith("(CUDA out of memory)")
