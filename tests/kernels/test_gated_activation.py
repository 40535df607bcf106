"""Gated activations: torch's and transformers' values and rounding points, each row's bits its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.errors import KernelArgumentError
from kernels.gated_activation import clamped_swiglu, gelu_mul, silu_mul
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target
from tests.kernels.test_rows import DTYPES, assert_rarely_different, rows

LIMIT, ALPHA = 7.0, 1.702
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": silu_mul,
    "clamped silu": partial(silu_mul, limit=LIMIT),
    "gelu": gelu_mul,
    "swiglu": partial(clamped_swiglu, limit=LIMIT, alpha=ALPHA),
}


def by_torch(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if name == "silu":
        return functional.silu(gate) * up
    if name == "clamped silu":
        return functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    if name == "gelu":
        # (1 + tanh(u)) / 2 as a sigmoid: where tanh is near -1, torch's 1 + tanh has lost its digits.
        x = gate.double()
        return (x * torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3))).to(gate.dtype) * up
    wide, other = gate.float().clamp(max=LIMIT), up.float().clamp(-LIMIT, LIMIT)
    return ((other + 1) * (wide * torch.sigmoid(wide * ALPHA))).to(gate.dtype)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 40, 1024, 2560])
def test_values(target: Target, dim: int, dtype: torch.dtype, name: str) -> None:
    """Large and small gates too; where f(gate) is rounded before the product, it is there."""
    gate_up = rows(3, 2 * dim, dtype=dtype, device=target.device) * 8
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -200.0, 200.0, 3e-5
    got, wanted = OPS[name](gate_up, backend=target.backend), by_torch(name, *gate_up.chunk(2, dim=-1))
    if dtype is torch.float32:
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-7)
    else:
        assert_rarely_different(got, wanted)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("threads", [1] if INTERPRETING else [1, 2, 3])
def test_a_row_has_its_own_bits(target: Target, name: str, threads: int) -> None:
    """On a CPU threads share a tensor without regard to rows, and what they do last goes through other code."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dim in (50, 96):
            gate_up = rows(1001, 2 * dim, dtype=torch.float32, device=target.device)
            if INTERPRETING:
                gate_up = gate_up[:40]
            together = OPS[name](gate_up, backend=target.backend)
            for first, count in ((0, 1), (0, 777), (3, 20), (499, 4)):
                some = gate_up[first : first + count]
                assert_same_bits(OPS[name](some, backend=target.backend), together[first : first + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", OPS)
def test_slices_into_given_memory(target: Target, name: str) -> None:
    wide = rows(4, 96, device=target.device)
    out = torch.full((4, 32), float("nan"), dtype=torch.bfloat16, device=target.device)
    assert OPS[name](wide[:, 16:80], out=out, backend=target.backend) is out
    assert_rarely_different(out, by_torch(name, wide[:, 16:48], wide[:, 48:80]))


@pytest.mark.parametrize("name", OPS)
def test_what_is_no_number_stays_none(target: Target, name: str) -> None:
    gate_up = rows(2, 8, device=target.device)
    gate_up[0, 1] = gate_up[1, 6] = float("nan")
    got = OPS[name](gate_up, backend=target.backend).isnan()
    assert got.tolist() == [[False, True, False, False], [False, False, True, False]]


@pytest.mark.parametrize("name", OPS)
def test_no_rows(target: Target, name: str) -> None:
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=target.device)
    assert OPS[name](empty, backend=target.backend).shape == (0, 32)


@pytest.mark.skipif(INTERPRETING, reason="the reference against transformers")
def test_against_transformers() -> None:
    """gpt-oss' gates and ups alternate: they are sorted here as they would be when a checkpoint is loaded."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    activations = pytest.importorskip("transformers.activations")
    mixed = rows(20, 96, dtype=torch.float32) * 6
    gate_up = torch.cat((mixed[:, ::2], mixed[:, 1::2]), dim=1)
    config = pytest.importorskip("transformers").GptOssConfig(
        hidden_size=8, intermediate_size=48, num_local_experts=1, num_experts_per_tok=1
    )
    wanted = gpt_oss.GptOssExperts(config)._apply_gate(mixed)
    torch.testing.assert_close(clamped_swiglu(gate_up, limit=LIMIT, alpha=ALPHA), wanted, rtol=1e-6, atol=1e-7)
    gate, up = gate_up.chunk(2, dim=1)
    wanted = activations.ACT2FN["gelu_pytorch_tanh"](gate) * up
    torch.testing.assert_close(gelu_mul(gate_up), wanted, rtol=1e-6, atol=1e-5)


X = rows(4, 64)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("gate_up", "change", "message"),
    [
        (X, {"out": X.view(-1)[:128].view(4, 32)}, "out: shares memory with gate_up"),
        (X[:, :63], {}, "gate_up: rows must have two halves, got 63 columns"),
        (X, {"out": torch.zeros_like(X)}, r"out: shape must be \[4, 32\], got \[4, 64\]"),
        (X.T, {}, "gate_up: the last axis must have stride 1"),
        (X.double(), {}, "gate_up: dtype must be one of"),
    ],
)
def test_wrong_arguments_are_named(gate_up: torch.Tensor, change: dict[str, Any], message: str, name: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        OPS[name](gate_up, **change)


def test_a_limit_is_positive() -> None:
    with pytest.raises(KernelArgumentError, match=r"limit: must be positive, got 0.0"):
        clamped_swiglu(X, limit=0.0, alpha=ALPHA)
    with pytest.raises(KernelArgumentError, match=r"limit: must be positive, got -1.0"):
        silu_mul(X, limit=-1.0)
