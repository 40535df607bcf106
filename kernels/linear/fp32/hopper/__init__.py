"""linear in fp32 on Hopper, for few rows: a launch for all slices of the depth, which reads the rows as they lie."""

from typing import NamedTuple

import torch

from kernels.backend import is_hopper


class Tile(NamedTuple):
    """Rows and outputs of a program. A thread has a patch of them, patch_n outputs x patch_m rows.

    A column of a patch is patch_n + patch_m words of shared memory for patch_n * patch_m multiply-adds. Of a warp 16
    lanes are along the outputs and 2 along the rows (block_n is 16 * patch_n), so that neighbours read the same outputs
    and every second lane the same rows: such a load of 16 bytes a lane is two requests and not four.
    """

    rows: int
    block_n: int
    patch_n: int
    patch_m: int
    num_warps: int


# Larger patches are fewer requests (3 for 8 multiply-adds with patches of 4 rows, 4 with 2): good where programs share
# a multiprocessor. Smaller ones are fewer instructions one after the other, for programs that have one each.
TILES = (Tile(8, 32, 2, 2, 2), Tile(16, 32, 2, 4, 2), Tile(32, 32, 2, 4, 4))
# With more rows the weights are a small part of what is read, and rows are transposed once for all programs.
MOST_ROWS = TILES[-1].rows


def takes(x: torch.Tensor) -> bool:
    """Returns whether rows x [num_rows, K] are few enough, on a device that has the kernel."""
    return x.shape[0] <= MOST_ROWS and is_hopper(x.device)


def tile_for(num_rows: int) -> Tile:
    """Returns the smallest tile that holds the rows, of up to MOST_ROWS."""
    return next(tile for tile in TILES if num_rows <= tile.rows)
