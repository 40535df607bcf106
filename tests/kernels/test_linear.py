"""linear and skinny_linear: near the product in higher precision, each row's bits its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.linear import LEAST_ROWS, Route, keeps_rows, linear
from kernels.skinny_linear import MAX_ROWS, fits_skinny, skinny_linear
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target

STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def made(*size: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """A sum's rounding grows with the whole row, not with the one value: so the scale of the tensor is what counts."""
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=step, atol=step * wanted.std().item() / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize(("rows", "outputs", "depth"), [(1, 130, 64), (70, 256, 200), (129, 48, 72)])
def test_a_product(target: Target, rows: int, outputs: int, depth: int, route: Route, dtype: torch.dtype) -> None:
    device = torch.device(target.device)
    x, weight = made(rows, depth, dtype=dtype, device=device), made(outputs, depth, dtype=dtype, device=device, seed=1)
    for bias in (None, made(outputs, dtype=dtype, device=device, seed=2)):
        got = linear(x, weight, bias, route=route, backend=target.backend)
        assert_near(got, exact(x, weight, bias))


def test_a_tiled_row_has_its_own_bits(target: Target) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the reference adds up as torch does")
    device = torch.device(target.device)
    x, weight = made(130, 136, device=device), made(100, 136, device=device, seed=1)
    together = linear(x, weight, route=Route.TILED, backend=target.backend)
    for first, count in ((0, 1), (3, 7), (60, 70), (129, 1)):
        alone = linear(x[first : first + count], weight, route=Route.TILED, backend=target.backend)
        assert_same_bits(alone, together[first : first + count])


def test_nothing_to_multiply(target: Target) -> None:
    device = torch.device(target.device)
    weight = made(64, 128, device=device)
    for route in Route:
        assert linear(weight[:0], weight, route=route, backend=target.backend).shape == (0, 64)


def test_what_keeps_rows_is_seen_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = made(24, 64, dtype=torch.float32)
    monkeypatch.setattr("kernels.linear.linear", lambda x, weight, bias: x.double() @ weight.double().t())
    assert keeps_rows(weight, None, 40)
    monkeypatch.setattr("kernels.linear.linear", lambda x, weight, bias: x @ weight.t() + x.shape[0])
    assert not keeps_rows(weight, None, 40)
    monkeypatch.setattr("kernels.linear.linear", lambda x, weight, bias: x @ weight.t() + x[:1, :1])
    assert not keeps_rows(weight, None, 40)


@pytest.mark.skipif(INTERPRETING, reason="Gluon has no interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_skinny_reference(dtype: torch.dtype) -> None:
    x, weight, bias = made(5, 256, dtype=dtype), made(70, 256, dtype=dtype, seed=1), made(70, dtype=dtype, seed=2)
    assert_near(skinny_linear(x, weight, bias), exact(x, weight, bias))
    assert skinny_linear(x[:0], weight).shape == (0, 70)


X, WEIGHT, BIAS = made(4, 128), made(64, 128, seed=1), made(64, seed=2)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": X[0]}, r"x: shape must be \[any, 128\], got \[128\]"),
    ({"x": X.float()}, "x: dtype must be one of"),
    ({"weight": WEIGHT.t()}, "weight: must be contiguous"),
    ({"bias": BIAS[:5]}, r"bias: shape must be \[64\], got \[5\]"),
]
WRONG_SKINNY: list[tuple[dict[str, Any], str]] = [
    ({"x": made(MAX_ROWS + 1, 128)}, f"x: at most {MAX_ROWS} rows"),
    ({"x": made(4, 100), "weight": made(64, 100)}, "weight: columns must be a multiple of 8, got 100"),
    ({"x": made(4, 129)[:, :128]}, "x: rows must be dense and 16-byte aligned"),
    ({"x": X.float(), "weight": WEIGHT.float()}, "weight: dtype must be one of"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
@pytest.mark.parametrize("op", [linear, skinny_linear])
def test_wrong_arguments_are_named(op: Callable[..., torch.Tensor], change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        op(**{"x": X, "weight": WEIGHT, "bias": BIAS, **change})


@pytest.mark.parametrize(("change", "message"), WRONG_SKINNY)
def test_what_skinny_cannot_do_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        skinny_linear(**{"x": X, "weight": WEIGHT, **change})


def test_a_cpu_fits_nothing() -> None:
    assert not fits_skinny(WEIGHT)


# One step and many, a last step of fewer columns, outputs that end within a tile.
SKINNY_SHAPES = [(64, 128), (200, 1160), (4096, 4096), (1000, 14336), (12288, 264)]


@pytest.mark.parametrize(("outputs", "depth"), SKINNY_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestSkinnyOnTheGpu:
    pytestmark = needs_gpu

    def test_a_product_and_the_bits_of_its_rows(self, outputs: int, depth: int, dtype: torch.dtype) -> None:
        x = made(MAX_ROWS, depth, dtype=dtype, device=GPU)
        weight = made(outputs, depth, dtype=dtype, device=GPU, seed=1)
        bias = made(outputs, dtype=dtype, device=GPU, seed=2)
        assert fits_skinny(weight)
        together = skinny_linear(x, weight, bias)
        assert_near(together, exact(x, weight, bias))
        for rows in (1, 2, 7, 8, 9, 16, 31, 33, MAX_ROWS):
            assert_same_bits(skinny_linear(x[:rows], weight, bias), together[:rows])
            assert_same_bits(skinny_linear(x[:rows].flip(0), weight, bias).flip(0), together[:rows])

    def test_replays(self, outputs: int, depth: int, dtype: torch.dtype) -> None:
        """A chain of launches, each of which may start before the one ahead, whose result it reads, has ended."""
        weight = made(outputs, depth, dtype=dtype, device=GPU, seed=1) / depth**0.5
        back = made(depth, outputs, dtype=dtype, device=GPU, seed=2) / outputs**0.5
        if not fits_skinny(back):
            pytest.skip("no way back")

        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(12):
                x = skinny_linear(skinny_linear(x, weight), back)
            return x

        x = made(8, depth, dtype=dtype, device=GPU)
        wanted = x
        for _ in range(12):
            middle = skinny_linear(wanted, weight)
            torch.cuda.synchronize()
            wanted = skinny_linear(middle, back)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(x)
        for _ in range(3):
            got.fill_(float("nan"))
            graph.replay()
            assert_same_bits(got, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_few_rows_are_padded() -> None:
    x, weight = made(LEAST_ROWS, 512, device=GPU), made(384, 512, device=GPU, seed=1)
    if not keeps_rows(weight, None, 64):
        pytest.skip("cuBLAS has a workspace in this process")
    whole = linear(x, weight)
    for rows in range(1, LEAST_ROWS):
        assert_same_bits(linear(x[:rows], weight), whole[:rows])
