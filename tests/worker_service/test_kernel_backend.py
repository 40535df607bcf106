"""The setting `kernel_backend`: it reaches every op of a launch, and the references give the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.random_model import make_random_model
from kernels.backend import Backend
from tests.worker_service.model_kit import CPU, NUM_PAGES, PAGE, PagedTokens, Part
from tests.worker_service.model_kit import Bench as ModelBench
from worker_service.gpu.page_pools import PagePools
from worker_service.model import attention, gemm_dispatch, mlps, norms
from worker_service.model.load import load_model
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import Runner

OPS = (
    (norms, "rms_norm"),
    (mlps, "silu_mul"),
    (gemm_dispatch, "linear"),
    (attention, "rotate_append_kv"),
    (attention, "decode_attention"),
    (attention, "prefill_attention"),
)


class Bench(ModelBench):
    """A folder's model as a worker loads it."""

    def __init__(self, folder: Path, backend: Backend) -> None:
        loaded = load_model(str(folder), CPU, backend=backend)
        self.config, self.page = loaded.spec, PAGE
        self.pages = PagePools(page_layouts(loaded.spec, torch.float32, PAGE), [NUM_PAGES], PAGE, CPU)
        self.runner = Runner(loaded.model, self.pages, CPU)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_random_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Backend]]:
    """The backends that each op was asked for."""
    seen: dict[str, set[Backend]] = {name: set() for _, name in OPS}

    def watched(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name].add(kwargs["backend"])
            return op(*args, **kwargs)

        return call

    for module, name in OPS:
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return seen


def launch(folder: Path, backend: Backend) -> list[int]:
    """Tokens of a launch with two prompts, and of one that decodes behind them."""
    bench = Bench(folder, backend)
    sequences: list[PagedTokens] = [bench.sequence(range(3, 40), [1, 2, 3]), bench.sequence(range(90, 99), [4, 5])]
    first = bench.run(*(Part(sequence, 0, len(sequence.tokens)) for sequence in sequences)).token_ids
    for sequence, token in zip(sequences, first, strict=True):
        sequence.tokens.append(token)
    second = bench.run(*(Part(sequence, len(sequence.tokens) - 1, len(sequence.tokens)) for sequence in sequences))
    return [*first, *second.token_ids]


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.REFERENCE])
def test_every_op_is_asked_for_it(folder: Path, asked: dict[str, set[Backend]], backend: Backend) -> None:
    launch(folder, backend)
    assert asked == {name: {backend} for _, name in OPS}


def test_references_give_the_same_tokens(folder: Path) -> None:
    assert launch(folder, Backend.REFERENCE) == launch(folder, Backend.AUTO)
