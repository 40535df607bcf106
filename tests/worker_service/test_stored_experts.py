"""Experts that stay as their checkpoint stores them: the values and the logits of those that are dequantised."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.random_model import make_random_model
from kernels.grouped_linear import (
    Fp8Experts,
    Fp8Words,
    Mxfp4Experts,
    Mxfp4Words,
    StoredExperts,
    dequantised,
    hopper,
    packed_experts,
)
from tests.worker_service.cuda_device import NEEDS_CUDA, prepared_cuda
from tests.worker_service.model_kit import CPU, PAGE, Bench, Part, random_tokens
from tests.worker_service.stored_models import FORMATS, make_fp8, make_mxfp4
from tests.worker_service.test_weight_formats import FP8_CONFIG, change_config, change_weights
from worker_service.model import mlps
from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import Decoder
from worker_service.model.families import family_of
from worker_service.model.gemm_dispatch import Invariance
from worker_service.model.layer_weights import ExpertWeight, MoeWeights
from worker_service.model.load import load_model
from worker_service.model.runner import RunnerLimits
from worker_service.model.weight_formats import ExpertFormat
from worker_service.model.weights import open_weights

DEVICES = [CPU, pytest.param(prepared_cuda(), marks=NEEDS_CUDA)]
LENGTH = 3 * PAGE + 5


@pytest.fixture(params=["fp8", "mxfp4"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """DeepSeek V3's or gpt-oss' layers."""
    if request.param == "fp8":
        make_fp8(tmp_path, "deepseek-v3")
    else:
        make_mxfp4(tmp_path)
    return tmp_path


def experts(folder: Path, *, keep: bool, dtype: torch.dtype = torch.bfloat16) -> list[ExpertWeight]:
    """Of all layers that have them: gate_up and down."""
    spec = read_model_spec(folder)
    source = open_weights(folder, spec, dtype, CPU, kept_formats=FORMATS if keep else ())
    take_layer = family_of(spec.architecture).take_layer
    layers = [take_layer(source, f"model.layers.{at}", spec, layer) for at, layer in enumerate(spec.layers)]
    return [
        weight for layer in layers if isinstance(mlp := layer.mlp, MoeWeights) for weight in (mlp.gate_up, mlp.down)
    ]


def check_values(folder: Path, made: ExpertFormat, dtype: torch.dtype) -> None:
    kept, wanted = experts(folder, keep=True, dtype=dtype), experts(folder, keep=False, dtype=dtype)
    assert kept and all(type(weight) is made for weight in kept)
    for weight, plain in zip(kept, wanted, strict=True):
        assert torch.equal(dequantised(weight, dtype), plain)
        assert all(part.is_contiguous() for part in weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-moe", "glm4-moe"])
def test_fp8_experts_are_those_of_the_checkpoint(tmp_path: Path, model: str, dtype: torch.dtype) -> None:
    make_fp8(tmp_path, model)
    check_values(tmp_path, Fp8Experts, dtype)


def test_scales_of_16_bits_and_powers_of_two_become_fp32(tmp_path: Path) -> None:
    make_fp8(tmp_path, "qwen3-moe")
    for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
        change_scales(tmp_path, dtype)
        check_values(tmp_path, Fp8Experts, torch.bfloat16)


def change_scales(folder: Path, dtype: torch.dtype) -> None:
    scales = {name: scale for name, scale in load_file(folder / WEIGHTS).items() if name.endswith("_scale_inv")}
    change_weights(folder, **{name: scale.to(dtype) for name, scale in scales.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp4_experts_are_those_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    make_mxfp4(tmp_path)
    check_values(tmp_path, Mxfp4Experts, dtype)


def kept_formats(folder: Path) -> list[type]:
    return [type(weight) for weight in experts(folder, keep=True)]


def test_what_products_cannot_take_is_dequantised(tmp_path: Path) -> None:
    """A gate's last block cut short, where the up projection follows it."""
    make_fp8(tmp_path, "qwen3-moe", moe_intermediate_size=24)
    assert kept_formats(tmp_path) == [torch.Tensor, Fp8Experts] * 2


def test_blocks_of_another_size_are_dequantised(tmp_path: Path) -> None:
    make_fp8(tmp_path, "qwen3-moe")
    stored = load_file(tmp_path / WEIGHTS)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        rows, columns = (-(-size // 64) for size in stored[name.removesuffix("_scale_inv")].shape)
        halved = stored[name].repeat_interleave(2, 0).repeat_interleave(2, 1)
        change_weights(tmp_path, **{name: halved[:rows, :columns].contiguous()})
    change_config(tmp_path, quantization_config={**FP8_CONFIG, "weight_block_size": [64, 64]})
    assert kept_formats(tmp_path) == [torch.Tensor] * 4


def test_one_plain_expert_makes_its_layer_plain(tmp_path: Path) -> None:
    make_fp8(tmp_path, "qwen3-moe")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    change_weights(tmp_path, **{name: torch.ones(160, 128), f"{name}_scale_inv": None})
    assert kept_formats(tmp_path) == [Fp8Experts, Fp8Experts, Fp8Experts, torch.Tensor]


def logits(folder: Path, device: torch.device, *, keep: bool) -> list[torch.Tensor]:
    """Of a cold prompt, of what follows a prefix of two pages, and of a decoded token beside another prompt."""
    limits = RunnerLimits(4, 256, Invariance.BATCH, graphs=device.type == "cuda")
    bench = Bench(folder, device, torch.bfloat16, limits, kept_formats=FORMATS if keep else ())
    tokens = random_tokens(LENGTH + 1, 1)
    cold = bench.sequence(tokens[:LENGTH], [1, 2, 3, 4])
    made = [bench.all_logits(Part(cold, 0, LENGTH))]
    warm = bench.sequence(tokens, [1, 2, 5, 6])
    made.append(bench.all_logits(Part(warm, 2 * PAGE, LENGTH)))
    other = bench.sequence(random_tokens(20, 2), [7, 8])
    made.append(bench.runner.logits(bench.batch(Part(warm, LENGTH, LENGTH + 1), Part(other, 0, 20))))
    return made


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_while_a_model_is_loaded_one_layer_has_its_experts_in_both_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On Hopper, where they are put in words: of the layers before it the order of the files is gone."""
    if kind == "fp8":
        make_fp8(tmp_path, "qwen3-moe", num_hidden_layers=3)
    else:
        make_mxfp4(tmp_path, num_hidden_layers=3)
    packed: list[tuple[weakref.ref[torch.Tensor], type]] = []

    def pack(weight: StoredExperts, *given: Any, **named: Any) -> object:
        made = packed_experts(weight, *given, **named)
        packed.append((weakref.ref(weight.values), type(made)))
        assert [at for at, (values, _) in enumerate(packed) if values() is not None] == present[len(packed) - 1]
        return made

    present = [[0], [0, 1], [2], [2, 3], [4], [4, 5]]
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(mlps, "packed_experts", pack)
    spec = read_model_spec(tmp_path)
    Decoder(spec, open_weights(tmp_path, spec, torch.bfloat16, CPU, kept_formats=FORMATS), CPU)
    assert [made for _, made in packed] == [Fp8Words if kind == "fp8" else Mxfp4Words] * 6
    assert all(values() is None for values, _ in packed)


@pytest.mark.parametrize(("dtype", "kept_as"), [(torch.bfloat16, Fp8Words), (torch.float16, Fp8Experts)])
def test_fp8_is_put_in_words_for_rows_of_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kept_as: type
) -> None:
    """DeepSeek V3's layers, whose router has a bias in fp32."""
    make_fp8(tmp_path, "deepseek-v3")
    made: list[type] = []

    def pack(*given: Any, **named: Any) -> object:
        kept = packed_experts(*given, **named)
        made.append(type(kept))
        return kept

    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(mlps, "packed_experts", pack)
    spec = read_model_spec(tmp_path)
    Decoder(spec, open_weights(tmp_path, spec, dtype, CPU, kept_formats=FORMATS), CPU)
    assert made and set(made) == {kept_as}


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_gives_the_logits_of_the_dequantised_one(folder: Path, device: torch.device) -> None:
    assert torch.Tensor not in kept_formats(folder)
    kept, plain = logits(folder, device, keep=True), logits(folder, device, keep=False)
    assert all(torch.equal(one, other) for one, other in zip(kept, plain, strict=True))
    assert torch.equal(kept[0][2 * PAGE :], kept[1]) and kept[0].isfinite().all()


@pytest.mark.parametrize("expert_weights", ["stored", "dequantised"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_keeps_them_on_a_gpu_and_says_how_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: torch.device, expert_weights: str
) -> None:
    """Of two layers with 8 experts of 3 x 128 x 512: 3 MiB in fp8, 6 in bf16. Beside them embeddings of 260 x 512."""
    make_random_model(tmp_path)
    sizes = {"vocab_size": 260, "hidden_size": 512, "num_experts": 8, "eos_token_id": 257}
    make_fp8(tmp_path, "qwen3-moe", **sizes)
    with caplog.at_level("INFO", "worker_service"):
        loaded = load_model(str(tmp_path), device, dtype="bfloat16", expert_weights=expert_weights)
    (record,) = [record for record in caplog.records if record.message == "weights loaded"]
    is_kept = expert_weights == "stored" and device.type == "cuda"
    assert record.experts_as_stored_mb == ({"fp8": 3} if is_kept else {})
    others_mb = sum(linear.weight.nbytes for linear in loaded.model.linears()) >> 20
    assert (3 if is_kept else 6) <= record.weights_mb - others_mb <= (4 if is_kept else 7)
