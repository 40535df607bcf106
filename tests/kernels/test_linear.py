"""linear: near the product in higher precision, each row's bits its own."""

from typing import Any

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.linear import (
    LEAST_PACKED_ROWS,
    LEAST_ROWS,
    Route,
    _cancelling,
    as_tried,
    keeps_rows,
    linear,
    packed_weight,
)
from tests.kernels.compare import assert_same_bits
from tests.kernels.target import Target

STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def made(*size: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """A sum's rounding grows with the whole row, not with the one value: so the scale of the tensor is what counts."""
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=step, atol=step * wanted.std().item() / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
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
    monkeypatch.setattr("kernels.linear.linear", lambda x, weight, bias: torch.stack([weight @ row for row in x]))
    assert keeps_rows(weight, None, 40)
    monkeypatch.setattr("kernels.linear.linear", lambda x, weight, bias: x @ weight.t() + x.shape[0])
    assert not keeps_rows(weight, None, 40)
    monkeypatch.setattr("kernels.linear.linear", lambda x, weight, bias: x @ weight.t() + x[:1, :1])
    assert not keeps_rows(weight, None, 40)


def test_an_order_of_sums_that_shows_in_few_elements_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16 rows this library adds up from the other end. In bf16 none of the random elements tells."""

    def library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        terms = x.float()[:, None] * weight.float()
        terms = terms.flip(2) if x.shape[0] <= 16 else terms
        total = torch.zeros(terms.shape[:2])
        for column in range(terms.shape[2]):
            total += terms[:, :, column]
        return (total if bias is None else total + bias).to(x.dtype)

    monkeypatch.setattr("kernels.linear.linear", library)
    weight, bias = made(7, 48), made(7, seed=2)
    for given_bias in (None, bias):
        assert not keeps_rows(weight, given_bias, 40)
    monkeypatch.setattr("kernels.linear.MANY_WEIGHTS", 0)
    assert keeps_rows(weight, None, 40), "so that the test says what the second trial is for"


X, WEIGHT, BIAS = made(4, 128), made(64, 128, seed=1), made(64, seed=2)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": X[0]}, r"x: shape must be \[any, 128\], got \[128\]"),
    ({"x": X.float()}, "x: dtype must be one of"),
    ({"weight": WEIGHT.t()}, "weight: must be contiguous"),
    ({"bias": BIAS[:5]}, r"bias: shape must be \[64\], got \[5\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        linear(**{"x": X, "weight": WEIGHT, "bias": BIAS, **change})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_few_rows_are_padded() -> None:
    x, weight = made(LEAST_ROWS, 512, device=GPU), made(384, 512, device=GPU, seed=1)
    if not keeps_rows(weight, None, 64):
        pytest.skip("cuBLAS has a workspace in this process")
    whole = linear(x, weight)
    for rows in range(1, LEAST_ROWS):
        assert_same_bits(linear(x[:rows], weight), whole[:rows])


def test_rows_at_odd_places_are_made_dense() -> None:
    wide = made(34, 209)
    assert as_tried(wide) is wide
    assert as_tried(wide[:, 180:192]).is_contiguous()
    assert_same_bits(as_tried(wide[:, 180:192]), wide[:, 180:192])
    aligned = made(34, 216)[:, 184:196]
    assert as_tried(aligned) is aligned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("width", "first"), [(209, 180), (216, 184), (13, 1), (12, 0)])
def test_a_part_of_wider_rows_has_the_bits_of_dense_ones(width: int, first: int) -> None:
    """As of Kimi Linear's decays; whatever the number of rows."""
    wide, weight = made(256, width, device=GPU), made(60, 12, device=GPU, seed=1)
    if not keeps_rows(weight, None, 256):
        pytest.skip("the library does not keep rows of this shape")
    whole = linear(wide[:, first : first + 12].contiguous(), weight)
    for rows in (*range(1, 70), 100, 128, 200):
        assert_same_bits(linear(wide[:rows, first : first + 12], weight), whole[:rows])


# Of the model in the box, of one with 3,072 inputs, and nothing that a vector's width divides.
PACKED_SHAPES = [(512, 256), (256, 768), (1024, 3072), (97, 50)]


def packed(outputs: int, depth: int) -> torch.Tensor:
    weight = packed_weight(made(outputs, depth, dtype=torch.float32, seed=1))
    if not weight.is_mkldnn:
        pytest.skip("torch has no oneDNN here")
    return weight


@pytest.mark.parametrize(("outputs", "depth"), PACKED_SHAPES)
def test_a_packed_product(outputs: int, depth: int) -> None:
    plain, bias = made(outputs, depth, dtype=torch.float32, seed=1), made(outputs, dtype=torch.float32, seed=2)
    x = made(70, 2 * depth, dtype=torch.float32)[:, :depth]
    assert linear(x[:0], packed(outputs, depth)).shape == (0, outputs)
    for rows in (1, 2, 33, 70):
        assert_near(linear(x[:rows], packed(outputs, depth)), exact(x[:rows], plain, None))
        assert_near(linear(x[:rows], packed(outputs, depth), bias), exact(x[:rows], plain, bias))


@pytest.mark.parametrize(("outputs", "depth"), PACKED_SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_a_packed_product_has_its_own_bits(outputs: int, depth: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = made(300, depth, dtype=torch.float32), packed(outputs, depth)
        together = linear(x, weight)
        for first, count in ((0, LEAST_PACKED_ROWS), (7, 3), (100, 15), (5, 16), (13, 33), (0, 64), (41, 200)):
            assert_same_bits(linear(x[first : first + count], weight), together[first : first + count])
    finally:
        torch.set_num_threads(before)


def test_what_is_not_packed() -> None:
    """16-bit weights, and what the reference multiplies with."""
    plain = made(64, 128, dtype=torch.float32)
    assert packed_weight(WEIGHT) is WEIGHT
    assert packed_weight(plain, Backend.REFERENCE) is plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("outputs", "depth"), [(209, 48), (60, 12), (97, 48), (160, 32), (1000, 200), (768, 2048)])
def test_the_route_that_the_trial_chooses_keeps_rows(outputs: int, depth: int) -> None:
    """Rows whose exact sums are zero, so that each output is its rounding error, in launches of 8 to 140 rows."""
    weight = made(outputs, depth, device=GPU)
    route = Route.LIBRARY if keeps_rows(weight, None, 256) else Route.TILED
    rows, weights = _cancelling(made(140, depth, seed=1, device=GPU), weight, torch.Generator(GPU).manual_seed(7))
    together = linear(rows, weights, route=route)
    for count in range(8, 140):
        assert_same_bits(linear(rows[:count], weights, route=route), together[:count])
