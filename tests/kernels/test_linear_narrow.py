"""linear's narrow tiles for few rows and outputs: the bits of every other tile, whatever shared memory held before."""

import pytest
import torch

from kernels.backend import Backend
from kernels.linear import Route, linear
from kernels.linear.hopper import BLOCK_N, NARROW_BLOCK_N, Tiles, tiles_of
from tests.kernels.compare import assert_same_bits
from tests.kernels.test_linear import made

GPU = torch.device("cuda", 0)
# Outputs and depths: of Kimi Linear, Qwen3-Next and 8B models, and such that no tile and no stage divides.
SHAPES = (
    (2304, 4096), (2304, 1024), (2048, 4096), (2048, 512), (4096, 4096), (4096, 14336), (6144, 4096), (1024, 64),
    (1030, 136), (3049, 200), (4101, 2120), (2112, 7168), (9000, 776),
)  # fmt: skip
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    """Returns the product by these tiles; rows behind it and columns beside it are not written."""
    from kernels.linear.hopper.launch import launch_tiles

    rows, outputs = x.shape[0], weight.shape[0]
    around = x.new_full((rows + 64, outputs + 64), 7.0)
    launch_tiles(x, weight, bias, around[:rows, :outputs], tiles)
    assert (around[rows:] == 7.0).all() and (around[:, outputs:] == 7.0).all()
    return around[:rows, :outputs]


def tiles_to_try(rows: int, outputs: int) -> list[Tiles]:
    """Returns tiles of both widths."""
    return [tiles_of(block_n, rows, outputs) for block_n in (BLOCK_N, NARROW_BLOCK_N)]


def cancelling(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both such that exact products are zero: what comes out is the rounding of one order of sums."""
    half = x.shape[1] // 2
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(0)).to(x.device)
    x, weight = x.clone(), weight.clone()
    x[:, order[half:]], weight[:, order[half:]] = -x[:, order[:half]], weight[:, order[:half]]
    x[:, 2 * half :] = 0.0
    return x, weight


@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_all_tiles_have_the_bits_of_the_tiled_route(outputs: int, depth: int) -> None:
    x, weight = made(64, 2 * depth, device=GPU)[:, :depth], made(outputs, depth, device=GPU, seed=1)
    for given in ((x, weight), cancelling(x, weight)):
        whole = linear(*given, route=Route.TILED, backend=Backend.TRITON)
        for rows in ROWS:
            for tiles in tiles_to_try(rows, outputs):
                assert_same_bits(multiplied(given[0][:rows], given[1], None, tiles), whole[:rows])
        assert_same_bits(linear(given[0][40:], given[1], backend=Backend.GLUON), whole[40:])


@pytest.mark.parametrize(("outputs", "depth"), [(2304, 4096), (1031, 200)])
def test_fp16_and_a_bias(outputs: int, depth: int) -> None:
    dtype = torch.float16
    x, weight = made(64, depth, dtype=dtype, device=GPU), made(outputs, depth, dtype=dtype, device=GPU, seed=1)
    bias = made(outputs, dtype=dtype, device=GPU, seed=2)
    whole = linear(x, weight, bias, route=Route.TILED, backend=Backend.TRITON)
    for rows in (1, 8, 9, 17, 33, 64):
        for tiles in tiles_to_try(rows, outputs):
            assert_same_bits(multiplied(x[:rows], weight, bias, tiles), whole[:rows])


@pytest.mark.parametrize("left", [float("nan"), float("inf")])
def test_what_lies_in_shared_memory_reaches_no_row(left: float) -> None:
    """A launch fills all rings before: the rows behind x are then NaN, or infinite and NaN as products."""
    x, weight = made(64, 4096, device=GPU), made(2304, 4096, device=GPU, seed=1)
    filler = torch.full((64, 4096), left, dtype=x.dtype, device=GPU), torch.full_like(weight, left)
    for rows in (1, 8, 15, 16, 31, 32, 63):
        tiles = tiles_of(NARROW_BLOCK_N, rows, 2304)
        wanted = linear(x[:rows], weight, route=Route.TILED, backend=Backend.TRITON)
        for _ in range(3):
            multiplied(*filler, None, tiles_of(NARROW_BLOCK_N, 64, 2304))
            assert_same_bits(multiplied(x[:rows], weight, None, tiles), wanted)


def test_a_row_that_is_not_finite_is_alone() -> None:
    x, weight = made(8, 512, device=GPU), made(2048, 512, device=GPU, seed=1)
    tiles = tiles_of(NARROW_BLOCK_N, 8, 2048)
    clean = multiplied(x, weight, None, tiles)
    x[3] = float("nan")
    got = multiplied(x, weight, None, tiles)
    assert got[3].isnan().all()
    for row in (*range(3), *range(4, 8)):
        assert_same_bits(got[row], clean[row])
