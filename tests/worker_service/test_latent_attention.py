"""Prompts over latents in chunks of the workspace's size, and what that workspace takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.backend import Backend
from kernels.mla.plan import CHUNK_TOKENS
from tests.worker_service.model_kit import Bench, Part, make_reference, random_tokens
from tests.worker_service.published_configs import PUBLISHED
from worker_service.config import WorkerConfig
from worker_service.model import latent_attention
from worker_service.model.attention_specs import LatentSpec
from worker_service.model.config import parse_model_spec, read_model_spec
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.latent_attention import (
    CAPTURED_BYTES,
    LatentPlans,
    captured_latents,
    latent_workspace_bytes,
)
from worker_service.model.runner import RunnerLimits

LENGTH = 200
PAGES = tuple(range(1, 14))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek-v3")
    make_reference("deepseek-v3", folder)
    return folder


def logits(folder: Path, limits: RunnerLimits, cut: int = 0) -> torch.Tensor:
    bench = Bench(folder, limits=limits)
    sequence = bench.sequence(random_tokens(LENGTH, 1), PAGES)
    parts = [Part(sequence, 0, cut), Part(sequence, cut, LENGTH)] if cut else [Part(sequence, 0, LENGTH)]
    return torch.cat([bench.all_logits(part) for part in parts])


def test_a_small_workspace_computes_the_same(folder: Path) -> None:
    whole = logits(folder, RunnerLimits())
    in_chunks = logits(folder, RunnerLimits(latent_chunk_tokens=128))
    assert (whole - in_chunks).abs().max().item() <= 1e-5 * whole.abs().max().item()


@pytest.mark.parametrize("invariance", list(Invariance))
def test_every_invariance_computes_the_same(folder: Path, invariance: Invariance) -> None:
    """The paths of latent attention round differently, but they are one attention."""
    wanted = logits(folder, RunnerLimits())
    actual = logits(folder, RunnerLimits(invariance=invariance), cut=199)
    assert (wanted - actual).abs().max().item() <= 1e-5 * wanted.abs().max().item()


@pytest.mark.parametrize("invariance", list(Invariance))
def test_only_fast_cuts_decode_by_load(folder: Path, invariance: Invariance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the arguments that the plans are made with."""
    asked = []

    def decode_plan(max_seqs: int, max_seqlen_k: int, heads: int, *, by_load: bool, device: torch.device) -> None:
        asked.append(by_load)

    monkeypatch.setattr(latent_attention, "MlaDecodePlan", decode_plan)
    monkeypatch.setattr(latent_attention, "MlaPrefillPlan", lambda max_seqs, max_tokens, *, device: None)
    LatentPlans(read_model_spec(folder), 4, 64, 128, invariance, torch.device("cuda"), Backend.AUTO)
    assert asked == [invariance is Invariance.FAST]


def test_the_workspace_is_that_of_a_chunk_and_of_captured_launches(folder: Path) -> None:
    spec = read_model_spec(folder)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, LatentSpec)
    row = mixer.latent_dim + mixer.rope_dim + mixer.num_heads * (mixer.nope_dim + mixer.value_dim)
    state = 64 * mixer.num_heads * (mixer.value_dim + 2) * 4
    assert spec.max_model_len < 1024
    assert latent_workspace_bytes(spec, 128, 64, torch.bfloat16) == 2 * 128 * row * 2 + 2 * state
    assert latent_workspace_bytes(spec, 32_768, 64, torch.bfloat16) == 2 * 32_768 * row * 2 + state


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        ("deepseek-ai/DeepSeek-V3", (16_384, 16_384)),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", (32_768, 131_072)),
    ],
)
def test_captured_launches_hold_as_many_latents_as_fit_in_their_memory(name: str, captured: tuple[int, int]) -> None:
    spec = parse_model_spec(PUBLISHED[name])
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, LatentSpec)]
    longest = spec.max_model_len
    assert captured_latents(CHUNK_TOKENS, longest, mixers) == captured
    assert captured_latents(1024, longest, mixers) == (1024, 4096), "more chunks where the memory is for fewer"
    assert captured_latents(1024, 2000, mixers) == (1024, 2048), "as many as a prompt may have"
    assert captured_latents(1024, 500, mixers) == (1024, 1024)
    assert captured_latents(1024, 500, []) == (0, 0)
    a_row = latent_workspace_bytes(spec, 1, 0, torch.bfloat16) // 2
    assert captured[0] * a_row <= CAPTURED_BYTES


def test_a_model_without_latents_needs_none(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    assert (
        latent_workspace_bytes(
            read_model_spec(tmp_path), WorkerConfig(model="m").latent_chunk_tokens, 64, torch.float32
        )
        == 0
    )
