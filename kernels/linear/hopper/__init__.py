"""linear's Gluon kernel for Hopper, for few rows: which products it takes, and with which tiles."""

from typing import NamedTuple

import torch

from kernels.backend import is_hopper

# Columns of the products, in narrow tiles rows of x; fewer rows are padded with zeros, which are not read.
COLUMNS = (8, 16, 32, 64)
# With more rows the products take as long as reading the weights, and the library's tiles are better.
MOST_ROWS = COLUMNS[-1]
# With fewer outputs there are too few tiles to read weights side by side.
LEAST_OUTPUTS = 1024
# Bytes at whose multiples a copy's rows begin.
ALIGNED_BYTES = 16
# Outputs of a tile whose weights are the rows of its products, and of a narrower one, where x has the rows.
BLOCK_N, NARROW_BLOCK_N = 64, 32
# Narrow tiles pay where they are no more than the multiprocessors and depths are long. On an H200, of 16 rows behind a
# norm, us with tiles of 64, 32 and 16 outputs: 4,096 outputs of a depth of 14,336 36.1, 34.3, 34.6; of 4,096 13.5,
# 12.8, 13.0; 2,304 of 4,096 9.9, 9.1, 10.0, of 1,024 3.6, 4.0, 4.2; 6,144 of 4,096 17.0, 17.1, 19.5.
LEAST_NARROW_DEPTH = 2048
# Columns of the depth in a stage. Of narrow tiles and up to 32 rows as many that copying 8 KB of weights and more takes
# longer than what is done once a stage: with 128 they take 3 to 10 % longer.
BLOCK_K, NARROW_BLOCK_K = 128, 256
# Bytes of a program's ring. With few outputs a smaller one leaves room beside the attention before it, so that weights
# are on their way while that ends (8 rows of an 8B model on an H200: a launch takes 4.13 ms, was 4.20).
RING_BYTES = 200 << 10
SMALL_RING_BYTES, FEW_OUTPUTS = 120 << 10, 8192
# Narrow tiles need few registers. Without a limit one program is given all 65,536 of a multiprocessor.
NARROW_REGISTERS = 64
# From here on 64 rows take tiles of 128 outputs, which read the rows half as often.
WIDE_OUTPUTS = 16384


class Tiles(NamedTuple):
    """Outputs of a tile, stages of the ring, each of block_k columns of the depth, and the most registers that a thread
    starts with."""

    block_n: int
    block_k: int
    stages: int
    registers: int | None = None


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
    """Returns the number of columns of the products, or of rows that a narrow tile loads."""
    return next(columns for columns in COLUMNS if columns >= num_rows)


def tiles_for(num_rows: int, num_outputs: int, depth: int, multiprocessors: int) -> Tiles:
    """Returns the tiles for a number of rows: time depends on them, and no bit does."""
    block_n = BLOCK_N
    if num_outputs <= NARROW_BLOCK_N * multiprocessors and depth >= LEAST_NARROW_DEPTH:
        block_n = NARROW_BLOCK_N
    elif columns_for(num_rows) == MOST_ROWS and num_outputs >= WIDE_OUTPUTS:
        block_n = 2 * BLOCK_N
    return tiles_of(block_n, num_rows, num_outputs)


def tiles_of(block_n: int, num_rows: int, num_outputs: int) -> Tiles:
    """Returns tiles of `block_n` outputs, and the stages, columns and registers that go with them."""
    columns = columns_for(num_rows)
    is_narrow = block_n < BLOCK_N
    block_k = NARROW_BLOCK_K if is_narrow and columns < MOST_ROWS else BLOCK_K
    ring_bytes = SMALL_RING_BYTES if columns == COLUMNS[0] and num_outputs <= FEW_OUTPUTS else RING_BYTES
    stages = ring_bytes // ((block_n + columns) * block_k * 2)
    return Tiles(block_n, block_k, stages, NARROW_REGISTERS if is_narrow else None)
