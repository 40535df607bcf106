"""combine_experts: sums in fp32 in the order of choice; with the ops before it, transformers' expert layers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.combine_experts import combine_experts
from kernels.errors import KernelArgumentError
from kernels.gates import times_sigmoid
from kernels.grouped_linear import grouped_linear, packed_experts, plan_experts
from kernels.route_experts import RoutingRule, route_experts
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def made(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "dim"), [(1, 8, 40), (5, 2, 2560), (3, 1, 64)])
def test_sums(target: Target, tokens: int, top_k: int, dim: int, dtype: torch.dtype) -> None:
    wide = made(tokens * top_k, dim + 16).to(dtype).to(target.device)
    rows, weights = wide[:, 8 : dim + 8], made(tokens, top_k, seed=1).to(target.device)
    got = combine_experts(rows, weights, backend=target.backend)
    for token in range(tokens):
        total = torch.zeros(dim, device=target.device)
        for place in range(top_k):
            total = total + weights[token, place] * rows[token * top_k + place].float()
        assert_same_bits(got[token], total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shared_expert_is_added(target: Target, dtype: torch.dtype) -> None:
    """The bits of sums apart: each product with a gate and each sum is rounded before the next."""
    rows, weights = made(10, 40).to(dtype).to(target.device), made(5, 2, seed=1).to(target.device)
    wide = made(5, 72, seed=2).to(dtype).to(target.device)
    shared, gate = wide[:, 8:48], wide[:, 50:51]
    alone = combine_experts(rows, weights, backend=target.backend)
    assert_same_bits(combine_experts(rows, weights, shared, backend=target.backend), alone + shared)
    gated = times_sigmoid(shared, gate, backend=target.backend)
    assert_same_bits(combine_experts(rows, weights, shared, gate, backend=target.backend), alone + gated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_shared_expert_is_added(target: Target, dtype: torch.dtype) -> None:
    """The last of each token's rows; its weight is not read."""
    rows, weights = made(15, 40).to(dtype).to(target.device), made(5, 3, seed=1).to(target.device)
    gate = made(5, 1, seed=2).to(dtype).to(target.device)
    weights[:, 2] = torch.nan
    of_token = rows.view(5, 3, 40)
    chosen, shared = of_token[:, :2].reshape(10, 40), of_token[:, 2].contiguous()
    for given in (None, gate):
        wanted = combine_experts(chosen, weights[:, :2].contiguous(), shared, given, backend=target.backend)
        fused = combine_experts(rows, weights, gate=given, fused_shared=True, backend=target.backend)
        assert_same_bits(fused, wanted)


def test_a_row_has_its_own_bits(target: Target) -> None:
    rows, weights = made(66, 300).to(target.device), made(33, 2, seed=1).to(target.device)
    together = combine_experts(rows, weights, backend=target.backend)
    for first, count in ((0, 1), (7, 20), (32, 1)):
        some = slice(2 * first, 2 * (first + count))
        alone = combine_experts(rows[some], weights[first : first + count], backend=target.backend)
        assert_same_bits(alone, together[first : first + count])


def test_no_tokens(target: Target) -> None:
    empty = torch.empty(0, 8, device=target.device)
    assert combine_experts(empty, empty, backend=target.backend).shape == (0, 8)


@pytest.mark.parametrize(
    ("rows", "weights", "message"),
    [
        (made(5, 8), made(3, 2), r"rows: shape must be \[6, any\], got \[5, 8\]"),
        (made(6, 8).double(), made(3, 2), "rows: dtype must be one of"),
        (made(6, 8), made(3, 2).half(), "weights: dtype must be one of"),
        (made(6, 8), made(2, 3).T, "weights: must be contiguous"),
        (made(0, 8), made(3, 0), "weights: a token must have an expert"),
    ],
)
def test_wrong_arguments_are_named(rows: torch.Tensor, weights: torch.Tensor, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        combine_experts(rows, weights)


@pytest.mark.parametrize(
    ("shared", "gate", "message"),
    [
        (made(3, 7), None, r"shared: shape must be \[3, 8\], got \[3, 7\]"),
        (made(3, 8).half(), None, "shared: dtype must be"),
        (made(3, 8), made(3, 2), r"gate: shape must be \[3, 1\]"),
        (None, made(3, 1), "gate: needs a shared expert's rows"),
    ],
)
def test_wrong_shared_experts_are_named(shared: torch.Tensor | None, gate: torch.Tensor | None, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        combine_experts(made(6, 8), made(3, 2), shared, gate)


def test_a_fused_shared_expert_needs_a_row() -> None:
    for rows, weights, shared in ((made(3, 8), made(3, 1), None), (made(6, 8), made(3, 2), made(3, 8))):
        with pytest.raises(KernelArgumentError, match="fused_shared: needs rows of a chosen and of the shared expert"):
            combine_experts(rows, weights, shared, fused_shared=True)


@pytest.mark.skipif(INTERPRETING, reason="the references against transformers")
@pytest.mark.parametrize("is_packed", [False, True])
def test_against_an_expert_layer_of_transformers(is_packed: bool) -> None:
    configs = pytest.importorskip("transformers")
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = configs.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=3, norm_topk_prob=True,
        experts_implementation="eager",
    )  # fmt: skip
    block = qwen.Qwen3MoeSparseMoeBlock(config).eval()
    for number, parameter in enumerate(block.parameters()):
        parameter.data = made(*parameter.shape, seed=number) / 4
    x = made(1, 40, 32, seed=9)
    with torch.no_grad():
        wanted = block(x)[0]
    weights = [block.experts.gate_up_proj.data, block.experts.down_proj.data]
    gate_up, down = (packed_experts(weight) if is_packed else weight for weight in weights)
    routing = route_experts(x[0] @ block.gate.weight.data.T, RoutingRule(3, renormalise=True))
    plan = plan_experts(routing.expert_ids, 12)
    gate, up = grouped_linear(x[0], gate_up, plan).chunk(2, dim=-1)
    rows = grouped_linear(functional.silu(gate) * up, down, plan)
    torch.testing.assert_close(combine_experts(rows, routing.weights), wanted, rtol=1e-5, atol=1e-6)
