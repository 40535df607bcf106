"""What a worker leaves of a GPU's memory to its pools, and the line that names the settings where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli.random_model import make_random_model
from kernels.fp8 import E4M3
from tests.worker_service.model_kit import make_reference
from worker_service import __main__ as command
from worker_service import compute
from worker_service.config import WorkerConfig
from worker_service.core.errors import PoolError
from worker_service.model import attention
from worker_service.model.choice_parts import CHOICE_BYTES
from worker_service.model.compressed_attention import PARTIAL_BYTES
from worker_service.model.config import read_model_spec
from worker_service.model.gemm_dispatch import MOST_PADDING

GIB = 1 << 30
GPU = torch.device("cuda")


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pool_mb": 1 << 30}, "pool_mb: more than this machine's memory holds (you tried to allocate 11"),
        ({"pool_pages": 1 << 40}, "pool_pages: more than this machine's memory holds"),
        ({"max_num_seqs": 1 << 40}, "max_num_seqs, token_budget: more than this machine's memory holds"),
    ],
)
def test_what_a_cpu_has_no_memory_for_is_named(changes: dict[str, int], named: str, tmp_path: Path) -> None:
    """Beyond what any process can address, as the settings' own limits are not."""
    make_random_model(tmp_path)
    config = WorkerConfig(model=str(tmp_path), device="cpu", threads=1, **changes)  # type: ignore[arg-type]
    with pytest.raises(PoolError) as caught:
        compute.prepare(config)
    assert str(caught.value).startswith(named)


@pytest.mark.parametrize(
    ("name", "index_dtype", "beside_choices", "token_bytes"),
    [
        ("llama", None, 0, 0),
        ("deepseek-v32", None, 0, 16 * (16 * 2 + 4) + 13 * 4),
        ("deepseek-v32", E4M3, 0, 16 * (16 * 2 + 4 + 16 + 4) + 13 * 4),
        ("deepseek-v4", None, PARTIAL_BYTES, 16 * (16 * 2 + 4) + 7 * 4),
    ],
)
def test_what_launches_need_is_taken_off_a_gpus_share(
    name: str,
    index_dtype: torch.dtype | None,
    beside_choices: int,
    token_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By index queries and choices of each token; 1,024 tokens at a time are absorbed queries besides."""
    make_reference(name, tmp_path)
    spec = read_model_spec(tmp_path)
    monkeypatch.setattr(compute, "pool_budget", lambda device, share, cpu_bytes: 9 * GIB)
    monkeypatch.setattr(attention, "is_hopper", lambda device: False)
    config = WorkerConfig(model="m", token_budget=2048)
    taken = 9 * GIB - compute._budget(config, spec, torch.bfloat16, index_dtype, GPU)
    absorbed = 1024 * 4 * (40 + 32) * 2 if name == "deepseek-v32" else 0
    choices = CHOICE_BYTES + (2048 + MOST_PADDING) * token_bytes if token_bytes else 0
    assert taken == beside_choices + choices + absorbed
    given = WorkerConfig(model="m", token_budget=2048, pool_mb=3)
    assert compute._budget(given, spec, torch.bfloat16, index_dtype, GPU) == 3 << 20, "as it was asked for"
