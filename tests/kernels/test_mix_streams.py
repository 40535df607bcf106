"""mix_streams: what a branch gets of several residual streams and how its output joins them, by their definitions."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.mix_streams import Collapsed, collapse_streams, expand_streams, join_streams
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target

TOKENS, EPS, NUM_ITERS = 5, 1e-6, 20
ATOL = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 1e-5}


class Inputs(NamedTuple):
    streams: torch.Tensor
    mixes: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor

    def rows(self, rows: slice) -> Inputs:
        return self._replace(streams=self.streams[rows], mixes=self.mixes[rows])


def make(target: Target, n: int, hidden: int, dtype: torch.dtype, width: int | None = None, scales: int = 3) -> Inputs:
    """mixes are slices of wider rows."""
    rng, width = torch.Generator().manual_seed(n), width or (2 + n) * n
    parts = (
        torch.randn(TOKENS, n, hidden, generator=rng).to(dtype),
        torch.randn(TOKENS, width + 8, generator=rng),
        torch.randn(width, generator=rng),
        torch.rand(scales, generator=rng) + 0.5,
    )
    streams, mixes, base, scale = (part.to(target.device) for part in parts)
    return Inputs(streams, mixes[:, :width], base, scale)


def collapse(given: Inputs, target: Target, num_iters: int = NUM_ITERS) -> Collapsed:
    return collapse_streams(*given, eps=EPS, num_iters=num_iters, backend=target.backend)


SHAPES = pytest.mark.parametrize(
    ("n", "hidden", "dtype"),
    [(4, 1500, torch.bfloat16), (4, 96, torch.float32), (2, 64, torch.float16), (3, 40, torch.float32)]
    + ([] if INTERPRETING else [(4, 7168, torch.bfloat16)]),
)


@SHAPES
@pytest.mark.parametrize("num_iters", [1, NUM_ITERS])
def test_collapse(target: Target, n: int, hidden: int, dtype: torch.dtype, num_iters: int) -> None:
    given = make(target, n, hidden, dtype)
    x, post, comb = collapse(given, target, num_iters)
    parts = (given.mixes.double().split([n, n, n * n], 1), given.base.double().split([n, n, n * n]))
    of_row, of_output, of_streams = (
        mix * factor + base for mix, base, factor in zip(*parts, given.scale.double(), strict=True)
    )
    wanted = ((of_row.sigmoid() + EPS).unsqueeze(-1) * given.streams.double()).sum(1)
    matrix = of_streams.view(-1, n, n).softmax(-1) + EPS
    matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    for _ in range(num_iters - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    torch.testing.assert_close(x.double(), wanted, rtol=1e-2 if dtype.itemsize < 4 else 1e-5, atol=ATOL[dtype])
    torch.testing.assert_close(post.double(), 2 * of_output.sigmoid(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(comb.double(), matrix, rtol=1e-4, atol=1e-6)


def test_sinkhorn_ends_with_sums_of_one(target: Target) -> None:
    comb = collapse(make(target, 4, 64, torch.bfloat16), target).comb
    for axis in (1, 2):
        torch.testing.assert_close(comb.sum(axis).cpu(), torch.ones(TOKENS, 4), rtol=0.0, atol=1e-3)


@SHAPES
def test_expand(target: Target, n: int, hidden: int, dtype: torch.dtype) -> None:
    given = make(target, n, hidden, dtype)
    _, post, comb = collapse(given, target)
    out = torch.randn(TOKENS, hidden + 8, generator=torch.Generator().manual_seed(7)).to(given.streams)[:, :hidden]
    got = expand_streams(out, given.streams, post, comb, backend=target.backend)
    kept = torch.einsum("tij,tid->tjd", comb.double(), given.streams.double())
    wanted = post.double().unsqueeze(-1) * out.double().unsqueeze(1) + kept
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2 if dtype.itemsize < 4 else 1e-5, atol=ATOL[dtype])


@SHAPES
def test_join(target: Target, n: int, hidden: int, dtype: torch.dtype) -> None:
    given = make(target, n, hidden, dtype, width=n, scales=1)
    got = join_streams(*given, eps=EPS, backend=target.backend)
    weights = (given.mixes.double() * given.scale.double() + given.base.double()).sigmoid() + EPS
    wanted = (weights.unsqueeze(-1) * given.streams.double()).sum(1)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2 if dtype.itemsize < 4 else 1e-5, atol=ATOL[dtype])


def test_bits_do_not_depend_on_other_rows(target: Target) -> None:
    given, ends = make(target, 4, 1500, torch.bfloat16), make(target, 4, 1500, torch.bfloat16, width=4, scales=1)
    made, joined = collapse(given, target), join_streams(*ends, eps=EPS, backend=target.backend)
    expanded = expand_streams(made.x, given.streams, made.post, made.comb, backend=target.backend)
    for token in range(TOKENS):
        one = slice(token, token + 1)
        alone = collapse(given.rows(one), target)
        for got, wanted in zip(alone, made, strict=True):
            assert_same_bits(got, wanted[one])
        again = expand_streams(alone.x, given.streams[one], alone.post, alone.comb, backend=target.backend)
        assert_same_bits(again, expanded[one])
        assert_same_bits(join_streams(*ends.rows(one), eps=EPS, backend=target.backend), joined[one])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streams": torch.zeros(2, 64)}, "streams: shape"),
        ({"streams": torch.zeros(2, 16, 4).mT}, "streams: must be contiguous"),
        ({"mixes": torch.zeros(2, 23)}, "mixes: shape"),
        ({"mixes": torch.zeros(2, 24, dtype=torch.bfloat16)}, "mixes: dtype"),
        ({"base": torch.zeros(23)}, "base: shape"),
        ({"scale": torch.zeros(1)}, "scale: shape"),
        ({"num_iters": 0}, "num_iters: must be positive"),
    ],
)
def test_what_collapse_refuses(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "streams": torch.zeros(2, 4, 16),
        "mixes": torch.zeros(2, 24),
        "base": torch.zeros(24),
        "scale": torch.zeros(3),
        "eps": EPS,
        "num_iters": 3,
    }
    with pytest.raises(KernelArgumentError, match=message):
        collapse_streams(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(2, 15)}, "out: shape"),
        ({"post": torch.zeros(2, 3)}, "post: shape"),
        ({"comb": torch.zeros(2, 4, 4, dtype=torch.bfloat16)}, "comb: dtype"),
    ],
)
def test_what_expand_refuses(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "out": torch.zeros(2, 16),
        "streams": torch.zeros(2, 4, 16),
        "post": torch.zeros(2, 4),
        "comb": torch.zeros(2, 4, 4),
    }
    with pytest.raises(KernelArgumentError, match=message):
        expand_streams(**{**arguments, **change})
