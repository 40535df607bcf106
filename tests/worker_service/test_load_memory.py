"""What loading needs beside the model itself, counted by torch's allocator: never a second copy of the experts."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from kernels.grouped_linear import Fp8Experts
from tests.worker_service.loaded_tensors import LoadedTensors
from tests.worker_service.model_kit import CPU, make_reference
from tests.worker_service.test_weight_formats import store_as_fp8
from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import expected_tensors
from worker_service.model.take_weights import take_experts
from worker_service.model.tensors import TensorSource
from worker_service.model.weights import open_weights

EXPERTS, INNER, HIDDEN = 8, 24, 48
NAMES = tuple(f"model.layers.1.mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up"))
DOWN = ("model.layers.1.mlp.experts.{expert}.down_proj.weight",)
# fp32, of one expert and of all.
MATRIX_BYTES = 4 * INNER * HIDDEN
STACK_BYTES = 2 * EXPERTS * MATRIX_BYTES


def peak_bytes(source: TensorSource, names: tuple[str, ...] = NAMES, rows: int = INNER) -> tuple[int, int]:
    """Returns the most bytes that were allocated at once while the experts were taken, and those in the end."""
    recorded: Any
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        experts = take_experts(source, names, EXPERTS, rows, INNER + HIDDEN - rows)
    assert experts.shape == (EXPERTS, len(names) * rows, INNER + HIDDEN - rows)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return max(held), held[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_reference("glm4-moe", tmp_path)
    return tmp_path


def opened(folder: Path) -> TensorSource:
    return open_weights(folder, read_model_spec(folder), torch.float32, CPU)


def test_experts_are_read_into_their_place(folder: Path) -> None:
    save_file({name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    assert peak_bytes(opened(folder)) == (STACK_BYTES + MATRIX_BYTES, STACK_BYTES)


def test_quantised_experts_too(folder: Path) -> None:
    """Beside the values of one matrix its factors, repeated along a row."""
    store_as_fp8(folder)
    peak, held = peak_bytes(opened(folder))
    assert held == STACK_BYTES
    assert STACK_BYTES + MATRIX_BYTES <= peak <= STACK_BYTES + 2 * MATRIX_BYTES


def test_experts_that_stay_stored_are_read_into_their_place(folder: Path) -> None:
    """A byte for a value, and a factor of fp32 for each matrix, which is one block. Beside them less than a matrix."""
    store_as_fp8(folder)
    source = open_weights(folder, read_model_spec(folder), torch.bfloat16, CPU, kept_formats=[Fp8Experts])
    stored_bytes = EXPERTS * (INNER * HIDDEN + 4)
    peak, held = peak_bytes(source, DOWN, HIDDEN)
    assert held == stored_bytes <= peak < stored_bytes + INNER * HIDDEN


def test_a_mapping_gives_its_tensors_up_for_the_stack(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    assert peak_bytes(LoadedTensors(tensors)) == (STACK_BYTES, STACK_BYTES)
    stacked = {name.format(expert=expert) for name in NAMES for expert in range(EXPERTS)}
    assert not stacked & tensors.keys()


def test_a_file_is_mapped_until_its_last_tensor_is_read(folder: Path) -> None:
    """The values have another dtype than the file, so nothing of the model lies in the mapping."""

    def is_mapped() -> bool:
        return str(folder / WEIGHTS) in Path("/proc/self/maps").read_text()

    spec = read_model_spec(folder)
    source = open_weights(folder, spec, torch.bfloat16, CPU)
    tensors = list(expected_tensors(spec).items())
    for name, (shape, _) in tensors[:-1]:
        source.take(name, *shape)
        assert is_mapped()
    name, (shape, _) = tensors[-1]
    source.take(name, *shape)
    assert not is_mapped()
