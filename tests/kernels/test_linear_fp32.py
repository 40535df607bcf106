"""linear's TILED route in fp32: slices of the depth, added up in ascending order, whichever program computes them."""

from collections.abc import Callable

import pytest
import torch

from kernels.backend import Backend
from kernels.graph_capture import graph_capture
from kernels.linear import Route, linear
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import rarely_interpreted
from tests.kernels.target import Target
from tests.kernels.test_linear import GPU, assert_near, exact, made

SLICE_K = 256
# On the slices' grid, off it, shorter than one slice, and no multiple of anything.
DEPTHS = [*map(rarely_interpreted, (512, 600)), 200, 1025]

Product = Callable[..., torch.Tensor]


def floats(*size: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return made(*size, dtype=torch.float32, device=torch.device(device), seed=seed)


@pytest.fixture
def product(target: Target) -> Product:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the reference adds up as torch does")
    return lambda x, weight, bias=None: linear(x, weight, bias, route=Route.TILED, backend=target.backend)


@pytest.mark.parametrize("depth", DEPTHS)
def test_near_the_product_in_fp64(target: Target, product: Product, depth: int) -> None:
    weight, bias = floats(70, depth, device=target.device, seed=1), floats(70, device=target.device, seed=2)
    x = floats(100, 2 * depth, device=target.device)[:, depth:]
    for rows in (1, 17, 100):
        assert_near(product(x[:rows], weight), exact(x[:rows], weight, None))
        assert_near(product(x[:rows], weight, bias), exact(x[:rows], weight, bias))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_has_its_own_bits(target: Target, product: Product, depth: int) -> None:
    """In launches of every tile, and beside rows that are no numbers."""
    x, weight = floats(130, depth, device=target.device), floats(70, depth, device=target.device, seed=1)
    together = product(x, weight)
    for first, count in ((0, 1), (3, 16), (5, 17), (60, 32), (64, 33), (1, 65), (129, 1)):
        assert_same_bits(product(x[first : first + count], weight), together[first : first + count])
    beside = x[:40].clone()
    beside[::2] = float("nan")
    assert_same_bits(product(beside, weight)[1::2], together[1:40:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_16_bits_are_widened_exactly(target: Target, product: Product, dtype: torch.dtype) -> None:
    x, weight = floats(40, 300, device=target.device).to(dtype), floats(70, 300, device=target.device, seed=1)
    assert_same_bits(
        product(x[:, 4:204], weight[:, :200].contiguous()), product(x.float()[:, 4:204], weight[:, :200].contiguous())
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_who_computes_the_slices_changes_no_bit(
    target: Target, product: Product, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealt out, all in one program, and a few rows at a time."""
    x, weight = floats(130, depth, device=target.device), floats(70, depth, device=target.device, seed=1)
    bias = floats(70, device=target.device, seed=2)
    dealt_out = product(x, weight, bias)
    monkeypatch.setattr("kernels.linear.fp32.triton.CHUNK_ROWS", 64)
    assert_same_bits(product(x, weight, bias), dealt_out)
    monkeypatch.setattr("kernels.linear.fp32.triton.MAX_PARTIALS_BYTES", 0)
    assert_same_bits(product(x, weight, bias), dealt_out)
    monkeypatch.undo()
    monkeypatch.setattr("kernels.linear.fp32.triton.MAX_PARTIALS_BYTES", 0)
    assert_same_bits(product(x, weight, bias), dealt_out)


@pytest.mark.parametrize("max_bytes", [0, 1 << 25])
def test_slices_are_added_in_ascending_order(
    target: Target, product: Product, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2**25 + 1 is 2**25 in fp32: what is left in the end tells which slice came when."""
    monkeypatch.setattr("kernels.linear.fp32.triton.MAX_PARTIALS_BYTES", max_bytes)
    weight, large = torch.zeros(3, 20 * SLICE_K, device=target.device), 2.0**25
    for output, places in enumerate(((0, 1, 2), (0, 19, 18), (17, 5, 18))):
        for place, value in zip(places, (large, 1.0, -large), strict=True):
            weight[output, place * SLICE_K + 7] = value
    got = product(torch.ones(2, 20 * SLICE_K, device=target.device), weight)
    assert got.tolist() == [[0.0, 1.0, 0.0]] * 2


def test_how_much_memory_lies_between_the_launches() -> None:
    pytest.importorskip("triton")
    from kernels.linear.fp32 import triton as fp32

    for depth in (1, 256, 7168, 100_000, 1 << 20):
        rows, tile = fp32.chunk_rows(depth), fp32.TILES[-1].block_m
        assert rows % tile == 0 and tile <= rows <= fp32.CHUNK_ROWS
        assert rows == tile or 4 * rows * depth <= fp32.MAX_TRANSPOSED_BYTES
    assert [fp32.tile_for(rows).block_m for rows in (1, 16, 17, 32, 33, 64, 1024)] == [16, 16, 32, 32, 64, 64, 64]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("outputs", "depth"), [(256, 7168), (160, 5120), (128, 4096), (4096, 4096)])
def test_routers_of_real_size(outputs: int, depth: int) -> None:
    """One row's bits in launches of 1 to 2,100 rows, eager and replayed from a captured graph."""
    x, weight = floats(2100, depth, device="cuda"), floats(outputs, depth, device="cuda", seed=1)
    together = linear(x, weight, route=Route.TILED)
    assert_near(together, exact(x, weight, None))
    for first, count in ((0, 1), (7, 16), (100, 31), (1000, 64), (900, 512), (60, 2040)):
        assert_same_bits(linear(x[first : first + count], weight, route=Route.TILED), together[first : first + count])
    given = x[:16].clone()
    linear(given, weight, route=Route.TILED)
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        out = linear(given, weight, route=Route.TILED)
    given.copy_(x[500:516])
    graph.replay()
    torch.cuda.synchronize(GPU)
    assert_same_bits(out, together[500:516])
