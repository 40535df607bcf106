"""What keeps pages apart whose bits may differ: the device, the software and the kernels are in the fingerprint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli.random_model import make_random_model
from kernels.backend import Backend
from kernels.grouped_linear import Fp8Experts, Mxfp4Experts
from tests.worker_service.model_kit import CPU
from worker_service.compute import prepare
from worker_service.config import WorkerConfig
from worker_service.core.errors import ModelError
from worker_service.fingerprint import fingerprint
from worker_service.model import device as model_device
from worker_service.model.device import numerics, pick_expert_formats, pick_page_dtype

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The card that numerics sees; a test may change it."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (properties.major, properties.minor))
    return properties


def test_every_part_tells_two_workers_apart(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [numerics(CPU, Backend.AUTO), numerics(CUDA, Backend.AUTO), numerics(CUDA, Backend.REFERENCE)]
    card.major = 10
    seen.append(numerics(CUDA, Backend.AUTO))
    card.multi_processor_count = 148
    seen.append(numerics(CUDA, Backend.AUTO))
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    seen.append(numerics(CUDA, Backend.AUTO))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SOMETHING")
    seen.append(numerics(CPU, Backend.AUTO))
    monkeypatch.setattr(model_device, "NUMERICS_VERSION", 99)
    seen.append(numerics(CPU, Backend.AUTO))
    monkeypatch.setattr(torch, "__version__", "3.0.1")
    seen.append(numerics(CPU, Backend.AUTO))
    assert len(set(seen)) == len(seen)


def test_a_patch_release_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics(CPU, Backend.AUTO)
    monkeypatch.setattr(torch, "__version__", ".".join(torch.__version__.split(".")[:2]) + ".99+cu999")
    assert numerics(CPU, Backend.AUTO) == before


def test_the_fingerprint_holds_numerics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_model(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu", "threads": 1, "max_model_len": 64}
    first = prepare(WorkerConfig(**settings, pool_pages=8))
    wanted = fingerprint(first)
    assert fingerprint(prepare(WorkerConfig(**settings, pool_pages=9))) == wanted
    slow = prepare(WorkerConfig(**settings, pool_pages=8, kernel_backend="reference"))
    assert fingerprint(slow) != wanted
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SOMETHING")
    assert fingerprint(first) != wanted


def test_workers_that_cut_pages_otherwise_share_none(tmp_path: Path) -> None:
    """Where no page is larger than a part, the size of parts says nothing; pages of this model have a few KiB."""
    make_random_model(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu", "threads": 1, "max_model_len": 64}
    cut = {
        part_kb: fingerprint(prepare(WorkerConfig(**settings, pool_pages=8, host_part_kb=part_kb)))
        for part_kb in (1, 2, 1024, 4096)
    }
    assert cut[1024] == cut[4096]
    assert len(set(cut.values())) == 3


def test_workers_with_other_segments_of_attention_share_no_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without segments the fingerprint is what it was before there were any; a CPU says that it has none."""
    make_random_model(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu", "threads": 1, "max_model_len": 64}
    whole, first, second = (
        prepare(WorkerConfig(**settings, pool_pages=8, attention_segment_tokens=tokens)) for tokens in (0, 4096, 8192)
    )
    assert len({fingerprint(compute) for compute in (whole, first, second)}) == 3
    assert fingerprint(first._replace(segment_tokens=0)) == fingerprint(whole)
    said = [record.message for record in caplog.records if "attention_segment_tokens" in record.message]
    assert said == ["attention_segment_tokens changes nothing here"] * 2


def test_pages_of_another_dtype_are_smaller_and_other_pages(tmp_path: Path) -> None:
    make_random_model(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu", "threads": 1, "max_model_len": 64}
    wide, narrow = (
        prepare(WorkerConfig(**settings, pool_mb=1, kv_dtype=kv_dtype)) for kv_dtype in ("auto", "fp8_e4m3")
    )
    (wide_pool,), (narrow_pool,) = wide.pools.specs(), narrow.pools.specs()
    assert 4 * narrow_pool.page_bytes == wide_pool.page_bytes
    # Page 0, which belongs to nobody, is a part of the budget.
    assert narrow_pool.num_pages + 1 == 4 * (wide_pool.num_pages + 1)
    half = prepare(WorkerConfig(**settings, pool_mb=1, kv_dtype="fp8_e4m3", dtype="bfloat16"))
    assert half.pools.layout_id == narrow.pools.layout_id
    assert len({fingerprint(compute) for compute in (wide, narrow, half)}) == 3


def test_the_dtype_of_pages_is_checked_against_the_card(card: SimpleNamespace) -> None:
    assert pick_page_dtype("kv_dtype", "auto", CUDA) is None
    assert pick_page_dtype("kv_dtype", "fp8_e4m3", CPU) is torch.float8_e4m3fn
    assert pick_page_dtype("kv_dtype", "fp8_e4m3", CUDA) is torch.float8_e4m3fn
    card.major, card.minor = 8, 6
    with pytest.raises(ModelError, match=r"kv_dtype.* 8\.9 or higher, this one has 8\.6"):
        pick_page_dtype("kv_dtype", "fp8_e4m3", CUDA)
    with pytest.raises(ModelError, match=r"kv_dtype.*'int8' is not supported; auto, fp8_e4m3 are"):
        pick_page_dtype("kv_dtype", "int8", CPU)


def test_experts_stay_stored_where_the_device_reads_them(card: SimpleNamespace) -> None:
    """fp8 from capability 8.9 on."""
    assert pick_expert_formats("stored", CUDA) == (Fp8Experts, Mxfp4Experts)
    assert pick_expert_formats("dequantised", CUDA) == pick_expert_formats("stored", CPU) == ()
    card.major, card.minor = 8, 6
    assert pick_expert_formats("stored", CUDA) == (Mxfp4Experts,)
    with pytest.raises(ModelError, match="'bf16' is not supported; stored and dequantised are"):
        pick_expert_formats("bf16", CUDA)
