"""linear's Gluon kernel for few rows: the bits of the tiled route, whatever its tiles, and launches that overlap."""

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.gated_activation import silu_mul
from kernels.graph_capture import graph_capture
from kernels.linear import Route, linear
from kernels.linear.hopper import (
    BLOCK_N,
    COLUMNS,
    LEAST_OUTPUTS,
    NARROW_BLOCK_N,
    RING_BYTES,
    WIDE_OUTPUTS,
    columns_for,
    tiles_for,
    tiles_of,
)
from kernels.rms_norm import rms_norm
from tests.kernels.compare import assert_same_bits
from tests.kernels.test_linear import made

GPU = torch.device("cuda", 0)
MULTIPROCESSORS = 132
SHAPES = ((LEAST_OUTPUTS, 64), (1088, 4096), (1000 + 2 * LEAST_OUTPUTS, 200), (WIDE_OUTPUTS + 8, 1024), (4096, 14336))
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_tiles_fit_into_a_multiprocessor() -> None:
    for rows in range(1, COLUMNS[-1] + 1):
        for outputs in (LEAST_OUTPUTS, 2304, 4096, 6144, WIDE_OUTPUTS, 128_256):
            for block_n in (tiles_for(rows, outputs, 4096, MULTIPROCESSORS).block_n, BLOCK_N, NARROW_BLOCK_N):
                tiles = tiles_of(block_n, rows, outputs)
                assert columns_for(rows) >= rows
                assert tiles.stages >= 3
                assert tiles.stages * (block_n + columns_for(rows)) * 2 * tiles.block_k <= RING_BYTES


def test_few_outputs_of_long_depths_take_narrow_tiles() -> None:
    """Sizes of Kimi Linear, Qwen3-Next and 8B models on a card of 132 multiprocessors."""
    blocks = {
        (outputs, depth): [tiles_for(rows, outputs, depth, MULTIPROCESSORS).block_n for rows in COLUMNS]
        for outputs, depth in ((2048, 4096), (2048, 512), (2304, 1024), (4096, 14336), (6144, 4096), (28672, 4096))
    }
    assert blocks == {
        (2048, 4096): [32, 32, 32, 32],
        (2048, 512): [64, 64, 64, 64],
        (2304, 1024): [64, 64, 64, 64],
        (4096, 14336): [32, 32, 32, 32],
        (6144, 4096): [64, 64, 64, 64],
        (28672, 4096): [64, 64, 64, 128],
    }


def test_who_takes_few_rows() -> None:
    weight = made(LEAST_OUTPUTS, 64)
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        linear(made(4, 64), weight, backend=Backend.GLUON)


class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("outputs", "depth"), SHAPES)
    def test_a_row_has_the_bits_of_the_tiled_route(self, outputs: int, depth: int, dtype: torch.dtype) -> None:
        x = made(65, 2 * depth, dtype=dtype, device=GPU)[:, :depth]
        weight, bias = (made(*size, dtype=dtype, device=GPU, seed=1) for size in ((outputs, depth), (outputs,)))
        for given in (None, bias):
            whole = linear(x, weight, given, route=Route.TILED, backend=Backend.TRITON)
            for rows in (1, 2, 7, 8, 9, 16, 17, 33, 63, 64):
                for route in Route:
                    assert_same_bits(linear(x[:rows], weight, given, route=route, backend=Backend.GLUON), whole[:rows])
            assert_same_bits(linear(x[40:64], weight, given, backend=Backend.GLUON), whole[40:64])

    def test_a_product_that_is_none_of_its_own_is_refused(self) -> None:
        weight, wide = made(LEAST_OUTPUTS, 64, device=GPU), made(LEAST_OUTPUTS, 68, device=GPU)
        for x, w, reason in (
            (made(65, 64, device=GPU), weight, "needs 1 to 64 rows"),
            (made(4, 64, device=GPU), weight[:-1], "needs 1024 outputs or more"),
            (made(4, 68, device=GPU), wide, "needs rows at multiples of 16 bytes"),
            (made(4, 64, dtype=torch.float32, device=GPU), weight.float(), "needs 16-bit weights"),
        ):
            with pytest.raises(KernelArgumentError, match=reason):
                linear(x, w, backend=Backend.GLUON)

    @pytest.mark.parametrize("rows", [1, 16, 64])
    def test_launches_that_overlap_see_what_those_before_them_wrote(self, rows: int) -> None:
        """A chain whose buffers are taken again and again: a launch that began to read too early would show."""
        hidden, inner = 1024, 2048
        norm = made(hidden, device=GPU)
        layers = [
            (
                made(2 * inner, hidden, device=GPU, seed=2 * at) / 16,
                made(hidden, inner, device=GPU, seed=2 * at + 1) / 32,
            )
            for at in range(6)
        ]

        def chain(x: torch.Tensor) -> torch.Tensor:
            for up, down in layers:
                x = linear(silu_mul(linear(rms_norm(x, norm, 1e-5), up)), down)
            return x

        inputs = [made(rows, hidden, device=GPU, seed=seed) for seed in range(8)]
        one_by_one = []
        for x in inputs:
            y = x
            for up, down in layers:
                for step in (lambda z: rms_norm(z, norm, 1e-5), lambda z, up=up: linear(z, up), silu_mul):
                    y = step(y)
                    torch.cuda.synchronize()
                y = linear(y, down)
                torch.cuda.synchronize()
            one_by_one.append(y)
        given = inputs[0].clone()
        chain(given)
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            out = chain(given)
        for _ in range(20):
            for x, wanted in zip(inputs, one_by_one, strict=True):
                given.copy_(x)
                graph.replay()
                assert_same_bits(out, wanted)
