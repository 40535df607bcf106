"""linear's Gluon kernel for Hopper, for few rows: which products it takes, and with which tiles."""

from typing import NamedTuple

import torch

from kernels.backend import is_hopper

# Columns of the products; fewer rows are padded with zeros, which are not read.
COLUMNS = (8, 16, 32, 64)
# With more rows the products take as long as reading the weights, and the library's tiles are better.
MOST_ROWS = COLUMNS[-1]
# With fewer outputs there are too few tiles to read weights side by side.
LEAST_OUTPUTS = 1024
# Bytes at whose multiples a copy's rows begin.
ALIGNED_BYTES = 16
BLOCK_K = 128
# Bytes of a program's ring. With few outputs a smaller one leaves room beside the attention before it, so that weights
# are on their way while that ends (8 rows of an 8B model on an H200: a launch takes 4.13 ms, was 4.20).
RING_BYTES = 200 << 10
NARROW_RING_BYTES, NARROW_OUTPUTS = 120 << 10, 8192
# From here on 64 rows take tiles of 128 outputs, which read the rows half as often.
WIDE_OUTPUTS = 16384


class Tiles(NamedTuple):
    """Outputs of a tile and stages of the ring, each of BLOCK_K columns of the depth."""

    block_n: int
    stages: int


def reason_against(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Returns why the kernel cannot, or should not, multiply x [num_rows, K] by weight [N, K] transposed, or None."""
    if not is_hopper(x.device):
        return "needs a Hopper GPU"
    if weight.dtype is torch.float32:
        return "needs 16-bit weights"
    if not 0 < x.shape[0] <= MOST_ROWS:
        return f"needs 1 to {MOST_ROWS} rows"
    if weight.shape[0] < LEAST_OUTPUTS:
        return f"needs {LEAST_OUTPUTS} outputs or more"
    if any(t.stride(0) * t.element_size() % ALIGNED_BYTES or t.data_ptr() % ALIGNED_BYTES for t in (x, weight)):
        return f"needs rows at multiples of {ALIGNED_BYTES} bytes"
    return None


def columns_for(num_rows: int) -> int:
    """Returns the number of columns of the products."""
    return next(columns for columns in COLUMNS if columns >= num_rows)


def tiles_for(num_rows: int, num_outputs: int) -> Tiles:
    """Returns the tiles for a number of rows: time depends on them, and no bit does."""
    columns = columns_for(num_rows)
    block_n = 128 if columns == 64 and num_outputs >= WIDE_OUTPUTS else 64
    narrow = columns == 8 and num_outputs <= NARROW_OUTPUTS
    ring_bytes = NARROW_RING_BYTES if narrow else RING_BYTES
    return Tiles(block_n, ring_bytes // ((block_n + columns) * BLOCK_K * 2))
