"""head_linear: every head's rows times its own matrix, and what rows carry behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.head_linear import head_linear
from kernels.head_linear.hopper import FEW_HEADS, MOST_TOKENS, MOST_TOKENS_OF_MANY_HEADS, reason_against_case
from tests.kernels.compare import assert_same_bits
from tests.kernels.sparse_inputs import random_rows
from tests.kernels.target import Target

NAN = float("nan")


def rows_and_matrices(
    shape: tuple[int, int, int, int, int], *, is_transposed: bool = False, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x, weight and NaN for out, of (tokens, heads, K, N, carried columns); weights are slices."""
    tokens, heads, depth, num_outputs, carried = shape
    x = random_rows(tokens, heads, depth + carried, dtype=torch.bfloat16, device=device)
    wide = (num_outputs + 64, depth) if is_transposed else (depth + 64, num_outputs)
    weight = random_rows(heads, *wide, dtype=torch.bfloat16, device=device, seed=1)[:, 64:]
    out = x.new_full((tokens, heads, num_outputs + carried), NAN)
    return x, weight.transpose(1, 2) if is_transposed else weight, out


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(70, 3, 64, 96, 16), (5, 2, 40, 24, 0), (2, 1, 128, 64, 64)])
def test_products_and_carried_columns(
    target: Target, shape: tuple[int, int, int, int, int], is_transposed: bool
) -> None:
    x, weight, out = rows_and_matrices(shape, is_transposed=is_transposed, device=target.device)
    assert head_linear(x, weight, out, backend=target.backend) is out
    depth, num_outputs = weight.shape[1:]
    wanted = torch.einsum("thk,hkn->thn", x[..., :depth].double(), weight.double())
    torch.testing.assert_close(out[..., :num_outputs].double(), wanted, atol=1e-1, rtol=1e-2)
    assert_same_bits(out[..., num_outputs:], x[..., depth:])
    one = head_linear(x[1:2], weight, torch.empty_like(out[:1]), backend=target.backend)
    assert_same_bits(one[0], out[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 0, 8)}, "weight: K must be 1 to 16, as wide as x, got 0"),
        ({"weight": torch.zeros(3, 17, 8)}, "weight: K must be 1 to 16, as wide as x, got 17"),
        ({"weight": torch.zeros(2, 16, 8)}, "weight: shape"),
        ({"out": torch.zeros(2, 3, 9)}, "out: shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(2, 3, 16), "weight": torch.zeros(3, 16, 8), "out": torch.zeros(2, 3, 8)}
    with pytest.raises(KernelArgumentError, match=message):
        head_linear(**{**arguments, **change})


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "few", "many"),
    [
        ((150, 3, 128, 192, 64), 64, 200), ((1100, 2, 64, 128, 8), 64, 200), ((130, 2, 320, 128, 0), 64, 200),
        ((130, 2, 128, 64, 64), 64, 1000), ((150, 2, 64, 64, 0), 1000, 2000),
    ],
    ids=["held", "held in two ranges", "deep", "large", "few"],
)  # fmt: skip
def test_the_tiles_change_no_bit(
    target: Target, shape: tuple[int, int, int, int, int], few: int, many: int, is_transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows of all heads up to `few`, and from `many` on, have tiles of their own; 64 tokens always have small ones."""
    if target.backend is not Backend.REFERENCE:
        from kernels.head_linear import triton as launched

        monkeypatch.setattr(launched, "FEW_ROWS", few)
        monkeypatch.setattr(launched, "MANY_ROWS", many)
    x, weight, out = rows_and_matrices(shape, is_transposed=is_transposed, device=target.device)
    head_linear(x, weight, out, backend=target.backend)
    for some in (slice(0, 64), slice(60, 124), slice(shape[0] - 3, shape[0])):
        part = torch.full_like(out[some], NAN)
        assert_same_bits(head_linear(x[some], weight, part, backend=target.backend), out[some])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"is_transposed": True}, None),
        ({"shape": (1, 2, 512, 128, 0)}, None),
        ({"shape": (MOST_TOKENS, FEW_HEADS, 128, 512, 64)}, None),
        ({"shape": (MOST_TOKENS + 1, 2, 128, 512, 64)}, "needs at most 64 tokens of 2 heads, got 65"),
        ({"shape": (MOST_TOKENS_OF_MANY_HEADS, 128, 128, 512, 64)}, None),
        ({"shape": (MOST_TOKENS_OF_MANY_HEADS + 1, 33, 128, 512, 64)}, "needs at most 16 tokens of 33 heads, got 17"),
        ({"shape": (1, 2, 192, 512, 64)}, "matrices of 192 x 512, not one of"),
        ({"shape": (1, 2, 128, 512, 8)}, "rows not at multiples of 16 elements, strides"),
    ],
)
def test_what_the_kernel_for_few_tokens_takes(change: dict[str, Any], message: str | None) -> None:
    x, weight, _ = rows_and_matrices(**{"shape": (1, 2, 128, 512, 64), **change})
    reason = reason_against_case(x, weight)
    assert reason is None if message is None else str(reason).startswith(message)


def test_what_the_kernel_for_few_tokens_refuses() -> None:
    x, weight, out = rows_and_matrices((1, 2, 128, 512, 64))
    assert reason_against_case(x.half(), weight.half()) == "torch.float16 rows"
    gaps = weight.repeat_interleave(2, 2)[..., ::2]
    assert str(reason_against_case(x, gaps)).startswith("matrices with gaps, strides")
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        head_linear(x, weight, out, backend=Backend.GLUON)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize(("depth", "outputs", "carried"), [(128, 512, 64), (512, 128, 0)])
def test_few_tokens_have_the_bits_of_the_plain_kernel(
    heads: int, depth: int, outputs: int, carried: int, is_transposed: bool
) -> None:
    most = MOST_TOKENS if heads <= FEW_HEADS else MOST_TOKENS_OF_MANY_HEADS
    shape = (most, heads, depth, outputs, carried)
    x, weight, out = rows_and_matrices(shape, is_transposed=is_transposed, device="cuda")
    head_linear(x, weight, out, backend=Backend.TRITON)
    for tokens in {1, 2, 7, 8, 9, 16, min(40, most), most}:
        got = head_linear(x[:tokens], weight, torch.full_like(out[:tokens], NAN), backend=Backend.GLUON)
        assert_same_bits(got, out[:tokens])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [3, MOST_TOKENS])
def test_few_tokens_wait_for_the_launch_before(tokens: int) -> None:
    """Into the latents' space and back, again and again: a launch that read its rows too early would show."""
    x, into, wide = rows_and_matrices((tokens, 16, 128, 512, 64), device="cuda")
    _, back, _ = rows_and_matrices((tokens, 16, 512, 128, 64), is_transposed=True, device="cuda")
    back = back / 64

    def chain(backend: Backend) -> torch.Tensor:
        rows = x
        for _ in range(12):
            latents = head_linear(rows, into, torch.empty_like(wide), backend=backend)
            rows = head_linear(latents, back, torch.empty_like(x), backend=backend)
        return rows

    assert_same_bits(chain(Backend.GLUON), chain(Backend.TRITON))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("tokens", "backend"), [(3, Backend.GLUON), (64, Backend.GLUON), (64, Backend.TRITON)])
@pytest.mark.parametrize(("depth", "outputs", "carried"), [(128, 512, 64), (512, 128, 0)])
def test_rows_that_the_launch_before_writes_late_are_seen(
    tokens: int, backend: Backend, depth: int, outputs: int, carried: int
) -> None:
    from tests.kernels.late_writer import write_late

    x, weight, out = rows_and_matrices((tokens, 16, depth, outputs, carried), device="cuda")
    wanted = head_linear(x, weight, torch.empty_like(out), backend=backend)
    numbers = x.view(torch.int32)
    right = numbers.clone()
    for _ in range(3):
        numbers.zero_()
        torch.cuda.synchronize()
        write_late[(1,)](right, numbers, numbers.numel(), 500_000, num_warps=4)
        assert_same_bits(head_linear(x, weight, out, backend=backend), wanted)
        assert_same_bits(out, wanted)
