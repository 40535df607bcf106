"""The shared expert as one more of the experts' product: which checkpoints are loaded so; it changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file

from kernels.backend import Backend
from kernels.grouped_linear import MAX_EXPERTS, ExpertPlan, Fp8Experts, first_experts, last_expert, plan_experts
from kernels.route_experts import RoutingRule, Scoring
from tests.kernels.compare import assert_same_bits
from tests.worker_service.cuda_device import NEEDS_CUDA, prepared_cuda
from tests.worker_service.model_kit import CPU, MODELS, SIZES, config_of, random_reference
from tests.worker_service.stored_models import AS_FP8, FORMATS, make_fp8
from tests.worker_service.test_weight_formats import change_weights
from worker_service.model import mlps, take_weights
from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.config import read_model_spec
from worker_service.model.families import family_of
from worker_service.model.gemm_dispatch import GemmDispatch, Invariance
from worker_service.model.layer_weights import ExpertWeight, Linear, MoeWeights
from worker_service.model.mixers import Step
from worker_service.model.mlps import MOST_FUSED_TOKENS, MoeMlp
from worker_service.model.spec import DenseSpec, MoeSpec
from worker_service.model.take_weights import take_moe
from worker_service.model.tensors import NamesOnly
from worker_service.model.weights import open_weights

CUDA = prepared_cuda()
DEVICES = [CPU, pytest.param(CUDA, marks=NEEDS_CUDA)]
RULE = RoutingRule(6, Scoring.SIGMOID, renormalise=True, scale=2.5)


def moe_weights(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[MoeSpec, MoeWeights]:
    """Returns the spec and the weights of a folder's last layer of experts."""
    spec = read_model_spec(folder)
    source = open_weights(folder, spec, dtype, CPU, kept_formats=FORMATS)
    take_layer = family_of(spec.architecture).take_layer
    layers = [take_layer(source, f"model.layers.{at}", spec, layer) for at, layer in enumerate(spec.layers)]
    *_, (layer, weights) = [
        (layer.mlp, made.mlp)
        for layer, made in zip(spec.layers, layers, strict=True)
        if isinstance(layer.mlp, MoeSpec) and isinstance(made.mlp, MoeWeights)
    ]
    return layer, weights


def save(folder: Path, model: str, **sizes: Any) -> None:
    family, fields = MODELS[model]
    random_reference(config_of(family, {**SIZES, **fields, **sizes}), seed=1, spread=0.15).save_pretrained(folder)


@pytest.mark.parametrize(
    ("model", "sizes", "fuses"),
    [
        ("deepseek-v3", {"n_shared_experts": 1}, True),
        ("deepseek-v3", {"n_shared_experts": 2}, False),
        ("glm4-moe", {}, True),
        ("kimi-linear", {}, True),
        ("qwen3-next", {"shared_expert_intermediate_size": 24, "moe_intermediate_size": 24}, True),
        ("qwen3-next", {"shared_expert_intermediate_size": 40, "moe_intermediate_size": 24}, False),
    ],
)
def test_one_that_has_the_others_shape_is_loaded_behind_them(
    tmp_path: Path, model: str, sizes: dict[str, Any], fuses: bool
) -> None:
    save(tmp_path, model, **sizes)
    spec, weights = moe_weights(tmp_path)
    assert spec.shared is not None and weights.fused_shared == fuses
    assert (weights.shared is None) == fuses
    count = spec.num_experts + fuses
    assert weights.gate_up.shape[0] == count and weights.down.shape[0] == count
    if fuses:
        (down,) = [
            value
            for name, value in load_file(tmp_path / WEIGHTS).items()
            if "shared_expert" in name and name.endswith("down_proj.weight") and f".{last_layer(tmp_path)}." in name
        ]
        assert_same_bits(last_expert(weights.down, torch.bfloat16), down.to(torch.bfloat16))


def last_layer(folder: Path) -> int:
    return len(read_model_spec(folder).layers) - 1


def test_a_large_one_is_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "glm4-moe")
    spec, _ = moe_weights(tmp_path)
    monkeypatch.setattr(
        take_weights, "MOST_FUSED_WEIGHTS", read_model_spec(tmp_path).hidden_size * spec.intermediate_size - 1
    )
    _, weights = moe_weights(tmp_path)
    assert not weights.fused_shared and weights.gate_up.shape[0] == spec.num_experts


@pytest.mark.parametrize(("num_experts", "fuses"), [(MAX_EXPERTS - 1, True), (MAX_EXPERTS, False)])
def test_one_beyond_the_most_experts_of_a_product_is_apart(num_experts: int, fuses: bool) -> None:
    spec = MoeSpec(num_experts, 8, RULE, shared=DenseSpec(8))
    weights = take_moe(NamesOnly(), "model.layers.0.mlp", spec, 16)
    assert weights.fused_shared == fuses and weights.gate_up.shape[0] == MAX_EXPERTS


def test_one_that_is_stored_in_fp8_stays_so(tmp_path: Path) -> None:
    make_fp8(tmp_path, "deepseek-v3", n_shared_experts=1)
    spec, weights = moe_weights(tmp_path)
    assert weights.fused_shared and isinstance(weights.gate_up, Fp8Experts)
    assert weights.gate_up.shape[0] == spec.num_experts + 1


def test_one_that_is_stored_another_way_is_apart(tmp_path: Path) -> None:
    """Else its plain weights would make all others plain."""
    make_fp8(tmp_path, "deepseek-v3", n_shared_experts=1)
    name = f"model.layers.{last_layer(tmp_path)}.mlp.shared_experts.down_proj.weight"
    change_weights(tmp_path, **{name: torch.ones(160, 128), f"{name}_scale_inv": None})
    spec, weights = moe_weights(tmp_path)
    assert not weights.fused_shared and isinstance(weights.gate_up, Fp8Experts)
    assert weights.shared is not None and weights.gate_up.shape[0] == spec.num_experts


class Case(NamedTuple):
    hidden: int
    inner: int
    experts: int
    shared_gate: bool = False
    is_fp8: bool = False


# With the sizes of a row of Kimi Linear, Qwen3-Next and (which is not fused) DeepSeek V3, and few experts.
ON_HOPPER = [
    Case(2304, 1024, 40),
    Case(2048, 512, 40, True),
    Case(2048, 512, 40, True, True),
    Case(7168, 2048, 9, False, True),
]


def made_mlp(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[MoeMlp, GemmDispatch]:
    generator = torch.Generator().manual_seed(case.hidden)

    def made(*size: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(size, generator=generator) / size[-1] ** 0.5
        return values.to(device, dtype)

    def experts(rows: int, columns: int) -> ExpertWeight:
        plain = made(case.experts + 1, rows, columns)
        if not case.is_fp8:
            return plain
        return Fp8Experts(*map(torch.stack, zip(*map(AS_FP8.quantised, plain), strict=True)))

    spec = MoeSpec(
        case.experts, case.inner, RULE, wide_router=True, shared=DenseSpec(case.inner), shared_gate=case.shared_gate
    )
    assert spec.fits_shared
    router = made(case.experts + 8 * case.shared_gate, case.hidden).to(dtype if case.shared_gate else torch.float32)
    weights = MoeWeights(
        Linear(router, None), experts(2 * case.inner, case.hidden), experts(case.hidden, case.inner), fused_shared=True
    )
    mlp = MoeMlp(spec, weights, dtype, Backend.AUTO)
    return mlp, GemmDispatch(mlp.linears(), Invariance.BATCH, 256)


class FakeStep(NamedTuple):
    token_ids: torch.Tensor
    gemm: GemmDispatch


def outputs(mlp: MoeMlp, gemm: GemmDispatch, x: torch.Tensor) -> torch.Tensor:
    return mlp(x, cast(Step, FakeStep(torch.zeros(len(x), dtype=torch.int32, device=x.device), gemm)))


def rows_of(case: Case, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(MOST_FUSED_TOKENS + 1, case.hidden, generator=torch.Generator().manual_seed(5)).to(device, dtype)


@pytest.mark.parametrize("shared_gate", [False, True])
def test_fused_it_gives_what_it_gives_apart(monkeypatch: pytest.MonkeyPatch, shared_gate: bool) -> None:
    case = Case(48, 24, 7, shared_gate)
    apart, gemm = made_mlp(case, CPU, torch.float32)
    monkeypatch.setattr(mlps, "fuses_shared", lambda *given: True)
    fused, _ = made_mlp(case, CPU, torch.float32)
    counts: list[int] = []

    def counted(ids: torch.Tensor, count: int, **given: Any) -> ExpertPlan:
        counts.append(count)
        return plan_experts(ids, count, **given)

    monkeypatch.setattr(mlps, "plan_experts", counted)
    x = rows_of(case, CPU, torch.float32)
    wanted = outputs(apart, gemm, x)
    for tokens in (1, 5, MOST_FUSED_TOKENS, MOST_FUSED_TOKENS + 1):
        torch.testing.assert_close(outputs(fused, gemm, x[:tokens]), wanted[:tokens], rtol=1e-5, atol=1e-6)
    assert counts == [7, 8, 8, 8, 7]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ON_HOPPER, ids=str)
def test_on_hopper_it_has_the_bits_of_a_product_apart(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Few tokens, where it is fused, and the same tokens among more, where it is not."""
    mlp, gemm = made_mlp(case, CUDA, torch.bfloat16)
    assert mlp.fuses(MOST_FUSED_TOKENS)
    x = rows_of(case, CUDA, torch.bfloat16)
    assert not mlp.fuses(len(x))
    wanted = outputs(mlp, gemm, x)
    for tokens in (1, 2, 15, 16, 17, 33, MOST_FUSED_TOKENS):
        assert_same_bits(outputs(mlp, gemm, x[:tokens]), wanted[:tokens])
    assert wanted.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_some_experts_are_views(device: torch.device) -> None:
    plain = torch.randn(5, 128, 256).to(device)
    some = first_experts(plain, 3)
    assert isinstance(some, torch.Tensor) and torch.equal(some, plain[:3])
    assert_same_bits(last_expert(plain, torch.float32), plain[4])
    stored = Fp8Experts(*map(torch.stack, zip(*map(AS_FP8.quantised, plain), strict=True)))
    some = first_experts(stored, 3)
    assert isinstance(some, Fp8Experts) and some.shape == (3, 128, 256)
    assert some.values.data_ptr() == stored.values.data_ptr()
