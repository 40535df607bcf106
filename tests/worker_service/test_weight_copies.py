"""The bytes of stored tensors arrive on the device, whatever their dtype, shape and length beside the buffers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_service.model_kit import CPU, make_reference
from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import expected_tensors
from worker_service.model.weight_copies import WeightCopies
from worker_service.model.weights import open_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
SHAPES = ((), (1,), (0,), (64,), (65,), (3, 5, 7), (130, 33))
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda", 0),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    drawn = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return drawn.view(dtype).reshape(shape)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [1, 64, 1000, 1 << 20])
def test_the_same_bytes_arrive(device: torch.device, dtype: torch.dtype, chunk_bytes: int) -> None:
    copies = WeightCopies(device, chunk_bytes)
    stored = [random_bytes(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    made = [copies.through_buffers(tensor) for tensor in stored]
    for before, after in zip(stored, made, strict=True):
        assert (after.shape, after.dtype, after.device) == (before.shape, before.dtype, device)
        assert as_bytes(after) == as_bytes(before)


def test_a_tensor_that_is_not_contiguous_arrives_as_it_reads() -> None:
    stored = random_bytes((12, 20), torch.bfloat16)[:, ::3].t()
    made = WeightCopies(CPU, 50).through_buffers(stored)
    assert made.is_contiguous() and as_bytes(made) == as_bytes(stored.contiguous())


def test_the_source_may_change_when_the_call_returns() -> None:
    """As a mapping goes with the last tensor of its file."""
    copies, stored = WeightCopies(CPU, 64), random_bytes((1000,), torch.uint8)
    before = as_bytes(stored)
    made = copies.through_buffers(stored)
    stored.zero_()
    copies.through_buffers(stored)
    assert as_bytes(made) == before


def test_on_a_cpu_nothing_is_copied() -> None:
    stored = random_bytes((7,), torch.float32)
    assert WeightCopies(CPU).copied(stored) is stored


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk_bytes", [1 << 16, 64 << 20])
def test_many_chunks_beside_work_on_the_device(chunk_bytes: int) -> None:
    """The buffers are filled anew while earlier copies wait behind products that take their time."""
    device = torch.device("cuda", 0)
    copies, work = WeightCopies(device, chunk_bytes), torch.randn(4096, 4096, device=device)
    stored = [random_bytes((3_000_001,), torch.uint8, seed) for seed in range(12)]
    made = []
    for tensor in stored:
        for _ in range(5):
            work = torch.tanh(work @ work)
        made.append(copies.copied(tensor))
    for before, after in zip(stored, made, strict=True):
        assert torch.equal(after.cpu(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_checkpoint_is_the_same_on_both_devices(tmp_path: Path) -> None:
    make_reference("glm4-moe", tmp_path)
    save_file({name: tensor.bfloat16() for name, tensor in load_file(tmp_path / WEIGHTS).items()}, tmp_path / WEIGHTS)
    spec = read_model_spec(tmp_path)
    here, there = (open_weights(tmp_path, spec, torch.bfloat16, torch.device(name)) for name in ("cpu", "cuda"))
    for name, (shape, wide) in expected_tensors(spec).items():
        assert torch.equal(here.take(name, *shape, wide=wide), there.take(name, *shape, wide=wide).cpu()), name
