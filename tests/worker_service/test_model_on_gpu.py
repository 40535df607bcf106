"""A launch on a GPU: nothing waits for the device but the sampled tokens, and chunks and hits change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli.random_model import make_random_model
from tests.device_waits import no_device_waits
from tests.worker_service.cuda_device import NEEDS_CUDA
from tests.worker_service.model_kit import PAGE, Bench, Part
from worker_service.model.device import prepare_process
from worker_service.model.gemm_dispatch import gemm_shape

pytestmark = NEEDS_CUDA


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp("model")
    make_random_model(folder, seed=3)
    device = torch.device("cuda", 0)
    prepare_process(device, 0)
    return Bench(folder, device, torch.bfloat16)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_launch_waits_for_nothing_but_its_tokens(bench: Bench) -> None:
    decoding = bench.sequence(prompt(33, 1), [1, 2, 3], temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=5)
    penalised = bench.sequence(prompt(40, 2), [4, 5, 6], repetition_penalty=1.2, logprobs=3)
    chunk = bench.sequence(prompt(64, 3), [7, 8, 9, 10])
    bench.run(Part(decoding, 0, 32))
    batch = bench.batch(Part(decoding, 32, 33), Part(penalised, 0, 40), Part(chunk, 0, 32))
    wanted = bench.runner.run(batch)
    with no_device_waits():
        got = bench.runner.run(batch)
    assert got == wanted


@pytest.mark.parametrize("cut", [PAGE - 1, PAGE, PAGE + 1, 5 * PAGE])
def test_chunks_and_hits_leave_the_logits_bit_for_bit(bench: Bench, cut: int) -> None:
    tokens = prompt(150, 4)
    whole = bench.all_logits(Part(bench.sequence(tokens, range(1, 11)), 0, 150))
    cut_up = bench.sequence(tokens, range(11, 21))
    bench.all_logits(Part(cut_up, 0, cut))
    mate = bench.sequence(prompt(70, 5), range(21, 26))
    rest = bench.all_logits(Part(cut_up, cut, 150), Part(mate, 0, 70))[: 150 - cut]
    assert torch.equal(rest, whole[cut:])


def test_a_model_on_the_tiled_gemm(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves shapes for which the library is not row-stable: near it, and row-stable from one row on."""
    tokens = prompt(70, 6)
    wanted = bench.all_logits(Part(bench.sequence(tokens, range(1, 6)), 0, 70))
    everything = frozenset(map(gemm_shape, bench.runner._model.linears()))
    monkeypatch.setattr(bench.runner._gemm, "tiled", everything)
    whole = bench.all_logits(Part(bench.sequence(tokens, range(6, 11)), 0, 70))
    assert (whole - wanted).abs().max() < 0.1 * wanted.std()
    cut_up = bench.sequence(tokens, range(11, 16))
    cut = torch.cat([bench.all_logits(Part(cut_up, *ends), num_decode=0) for ends in ((0, 33), (33, 34), (34, 70))])
    assert torch.equal(cut, whole)
