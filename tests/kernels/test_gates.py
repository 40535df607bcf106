"""Gates of layers: torch's values, each row's bits its own, slices of a projection as rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.gates import delta_gates, gated_rms_norm, times_sigmoid
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target
from tests.kernels.test_rows import DTYPES, assert_rarely_different, rows

EPS = 1e-6
HEADS, DIM = 3, 40


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "columns"), [(1, 1), (40, 40), (1500, 1500), (1500, 1)])
def test_times_sigmoid(target: Target, dim: int, columns: int, dtype: torch.dtype) -> None:
    """A gate for each element, or one for the row; both are slices of wider rows."""
    x = rows(3, dim + 8, dtype=dtype, device=target.device)[:, 8:]
    gate = (rows(3, columns + 16, dtype=dtype, device=target.device, seed=1) * 8)[:, 16:]
    gate[0, 0], gate[1, 0] = -200.0, 200.0
    got = times_sigmoid(x, gate, backend=target.backend)
    assert_rarely_different(got, (x.double() * torch.sigmoid(gate.double())).to(dtype))


@pytest.mark.parametrize(("wide_weight", "silu"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 40, 128])
def test_gated_rms_norm(target: Target, dim: int, dtype: torch.dtype, wide_weight: bool, silu: bool) -> None:
    x = rows(5, HEADS, dim, dtype=dtype, device=target.device)
    gate = (rows(5, 8 + HEADS * dim, dtype=dtype, device=target.device, seed=1) * 4)[:, 8:]
    weight = rows(dim, dtype=torch.float32 if wide_weight else dtype, device=target.device, seed=2)
    got = gated_rms_norm(x, weight, EPS, gate, silu=silu, backend=target.backend)
    normed = functional.rms_norm(x.double(), (dim,), weight.double(), EPS).flatten(1)
    factor = functional.silu(gate.double()) if silu else gate.double().sigmoid()
    assert_rarely_different(got, (normed * factor).to(dtype))


@pytest.mark.parametrize(("heads", "dim"), [(6, 40), (4, 128), (4, 36)])
def test_many_heads_have_the_bits_of_few(target: Target, monkeypatch: pytest.MonkeyPatch, heads: int, dim: int) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the reference computes all heads at once")
    x, gate = (rows(5, heads, dim, dtype=torch.bfloat16, device=target.device, seed=seed) for seed in (0, 1))
    weight = rows(dim, dtype=torch.float32, device=target.device, seed=2)
    few = gated_rms_norm(x, weight, EPS, gate.flatten(1), backend=target.backend)
    monkeypatch.setattr("kernels.gates.triton.MANY_HEADS", 0)
    assert_same_bits(gated_rms_norm(x, weight, EPS, gate.flatten(1), backend=target.backend), few)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 6, 32])
def test_delta_gates(target: Target, heads: int, dtype: torch.dtype) -> None:
    """From decays that are nearly none, whose digits a logarithm of 1 + e would lose, to very fast ones."""
    both = rows(7, 2 * heads + 8, dtype=dtype, device=target.device) * 6
    both[:5, 0] = torch.tensor([-80.0, -15.0, -6.0, 19.9, 50.0])
    decay, beta = both[:, :heads], both[:, heads : 2 * heads]
    bias, a = (rows(heads, dtype=torch.float32, device=target.device, seed=seed) for seed in (1, 2))
    g, betas = delta_gates(decay, beta, bias, a, backend=target.backend)
    wanted = a.double() * functional.softplus(decay.double() + bias.double())
    torch.testing.assert_close(g.double(), wanted, rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(betas.double(), torch.sigmoid(beta.double()), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "keys"), [(1, 16), (6, 12), (12, 128)])
def test_delta_gates_of_key_channels(target: Target, heads: int, keys: int, dtype: torch.dtype) -> None:
    both = rows(7, heads * (keys + 1) + 8, dtype=dtype, device=target.device) * 6
    both[:5, 0] = torch.tensor([-80.0, -15.0, -6.0, 19.9, 50.0])
    decay, beta = both[:, : heads * keys], both[:, heads * keys : heads * (keys + 1)]
    bias, a = (
        rows(size, dtype=torch.float32, device=target.device, seed=seed)
        for seed, size in ((1, heads * keys), (2, heads))
    )
    g, betas = delta_gates(decay, beta, bias, a, backend=target.backend)
    wanted = a.double().repeat_interleave(keys) * functional.softplus(decay.double() + bias.double())
    torch.testing.assert_close(g.double(), wanted, rtol=3e-6, atol=1e-30)
    torch.testing.assert_close(betas.double(), torch.sigmoid(beta.double()), rtol=1e-6, atol=1e-30)


def sigmoid_of(target: Target, given: torch.Tensor) -> torch.Tensor:
    size = HEADS * DIM
    return times_sigmoid(given[:, :size], given[:, size : 2 * size], backend=target.backend)


def norm_of(target: Target, given: torch.Tensor) -> torch.Tensor:
    size = HEADS * DIM
    x, weight = given[:, :size].contiguous().view(-1, HEADS, DIM), torch.ones(DIM, device=given.device)
    return gated_rms_norm(x, weight, EPS, given[:, size : 2 * size], backend=target.backend)


def delta_of(target: Target, given: torch.Tensor) -> torch.Tensor:
    bias, a = (torch.full((50,), value, device=given.device) for value in (0.5, -0.3))
    return torch.cat(delta_gates(given[:, :50], given[:, 50:100], bias, a, backend=target.backend), dim=1)


def channels_of(target: Target, given: torch.Tensor) -> torch.Tensor:
    bias, a = (torch.full((size,), value, device=given.device) for size, value in ((150, 0.5), (50, -0.3)))
    return torch.cat(delta_gates(given[:, :150], given[:, 150:200], bias, a, backend=target.backend), dim=1)


@pytest.mark.parametrize("op", [sigmoid_of, norm_of, delta_of, channels_of])
@pytest.mark.parametrize("threads", [1] if INTERPRETING else [1, 2, 3])
def test_a_row_has_its_own_bits(
    target: Target, op: Callable[[Target, torch.Tensor], torch.Tensor], threads: int
) -> None:
    """On a CPU threads share a tensor without regard to rows, and what they do last goes through other code."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = rows(40 if INTERPRETING else 1001, 2 * HEADS * DIM, dtype=torch.float32, device=target.device)
        together = op(target, given)
        for first, count in ((0, 1), (0, 777), (3, 20), (499, 4)):
            assert_same_bits(op(target, given[first : first + count]), together[first : first + count])
    finally:
        torch.set_num_threads(before)


def test_no_rows(target: Target) -> None:
    empty = torch.empty(0, 2 * HEADS * DIM, dtype=torch.float32, device=target.device)
    assert [op(target, empty).shape for op in (sigmoid_of, norm_of)] == [(0, HEADS * DIM)] * 2
    assert (delta_of(target, empty).shape, channels_of(target, empty).shape) == ((0, 100), (0, 200))


X, WEIGHT, WIDE = rows(4, 6), rows(3), torch.zeros(6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: times_sigmoid(X, X[:, :3]), "gate: must have 1 or 6 columns, got 3"),
        (lambda: times_sigmoid(X, X.float()), "gate: dtype must be"),
        (lambda: times_sigmoid(X.T, X.T), "x: the last axis must have stride 1"),
        (lambda: gated_rms_norm(X.view(4, 2, 3), WEIGHT, EPS, X[:, :3]), r"gate: shape must be \[4, 6\]"),
        (lambda: gated_rms_norm(X.view(4, 2, 3), X[0], EPS, X), r"weight: shape must be \[3\]"),
        (lambda: delta_gates(X, X[:2], WIDE, WIDE), r"beta: shape must be \[4, any\]"),
        (lambda: delta_gates(X, X[:, :4], WIDE, WIDE[:4]), "beta: its heads must divide the 6 columns of decay, got 4"),
        (lambda: delta_gates(X, X[:, :3], WIDE, WIDE), r"a: shape must be \[3\]"),
        (lambda: delta_gates(X, X, WIDE, X[0]), "a: dtype must be"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        call()
