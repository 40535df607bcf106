"""Triton kernels of linear's TILED route in fp32, as routers of experts have it. Shapes were checked before.

Without tensor cores, which would cut the factors, one chain over the whole depth is long: 7,168 columns took 0.92 ms on
an H200, for 16 rows as for 512 (measured). So the depth is cut into slices of SLICE_K columns, at places that follow
from the depth alone. Each slice is one chain of fused multiply-adds in ascending order, and an element is the sum of
its slices in ascending order. Slices are dealt out to programs, and a launch of its own adds them up. Where there are
more tiles than have room for their slices in MAX_PARTIALS_BYTES, one program goes through all of them. On Hopper up to
32 rows have a Gluon kernel for the slices (`hopper`), which reads rows as they lie. No such choice changes a bit, nor
does the tile, so all may follow from the number of rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launches import allow_next_launch_and_wait, overlap_options
from kernels.linear.fp32 import hopper

# 7,168 to 256 is 28 slices of 4 tiles of 64 rows: 112 programs for 132 multiprocessors.
SLICE_K = 256
BLOCK_K = 32
# How many rows go through the three launches at a time, so that what lies between them stays near the L2 cache.
CHUNK_ROWS = 1024
MAX_TRANSPOSED_BYTES = 32 << 20
MAX_PARTIALS_BYTES = 32 << 20
SUM_BLOCK_N = 8
SLICES_AHEAD = 16


@triton.jit
def transpose_rows(
    x_ptr, transposed_ptr, num_rows, depth, width, stride_x_row,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """transposed[k, m] = x[m, k] in fp32, with zeros for m from num_rows to width.

    So lanes with neighbouring rows read neighbouring words of shared memory. From rows as they lie, 16 lanes would meet
    in the same banks, and the loads of a tile would take two to four times as long as its multiply-adds.
    """
    allow_next_launch_and_wait(OVERLAPS)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    source = x_ptr + m.to(tl.int64)[:, None] * stride_x_row + k[None, :]
    x = tl.load(source, mask=(m < num_rows)[:, None] & (k < depth)[None, :], other=0.0)
    tl.store(transposed_ptr + k[:, None] * width + m[None, :], tl.trans(x.to(tl.float32)), mask=(k < depth)[:, None])


@triton.jit
def slice_product(
    weight_row,
    transposed_row,
    first,
    depth,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE_K: tl.constexpr,
):
    """Returns [BLOCK_N, BLOCK_M] over the columns from `first` on, SLICE_K of them or to the depth."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for begin in range(first, tl.minimum(first + SLICE_K, depth), BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        weight = tl.load(weight_row + k[None, :], mask=k[None, :] < depth, other=0.0)
        x = tl.load(transposed_row + k[:, None] * width, mask=k[:, None] < depth, other=0.0)
        # IEEE: multiply-adds of fp32. Tensor cores would cut the factors to 10 bits of mantissa.
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    return acc


@triton.jit
def multiply_slices(
    transposed_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    depth,
    width,
    stride_weight_row,
    stride_out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One tile of one slice into partials [slices, num_outputs, width], or IS_WHOLE: of all into out.

    Outputs beyond the edge repeat the last one and are not stored.
    """
    allow_next_launch_and_wait(OVERLAPS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_read = tl.minimum(n, num_outputs - 1).to(tl.int64)
    weight_row = weight_ptr + n_read[:, None] * stride_weight_row
    transposed_row = transposed_ptr + m[None, :]
    if IS_WHOLE:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for first in range(0, depth, SLICE_K):
            total += slice_product(weight_row, transposed_row, first, depth, width, BLOCK_M, BLOCK_N, BLOCK_K, SLICE_K)
        if HAS_BIAS:
            total += tl.load(bias_ptr + n_read)[:, None]
        target = out_ptr + m.to(tl.int64)[None, :] * stride_out_row + n[:, None]
        tl.store(target, total, mask=(m < num_rows)[None, :] & (n < num_outputs)[:, None])
    else:
        part = tl.program_id(2)
        acc = slice_product(
            weight_row, transposed_row, part * SLICE_K, depth, width, BLOCK_M, BLOCK_N, BLOCK_K, SLICE_K
        )
        target = out_ptr + (part * num_outputs + n)[:, None] * width + m[None, :]
        tl.store(target, acc, mask=(n < num_outputs)[:, None])


@triton.jit
def sum_slices(
    partials_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_slices,
    width,
    stride_out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The slices of a tile in ascending order; AHEAD of them are loaded before the first is added."""
    allow_next_launch_and_wait(OVERLAPS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_inside = (n < num_outputs)[:, None] & (m < num_rows)[None, :]
    place = partials_ptr + n[:, None] * width + m[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for first in range(0, num_slices, AHEAD):
        for ahead in tl.static_range(AHEAD):
            part = first + ahead
            total += tl.load(place + part * num_outputs * width, mask=is_inside & (part < num_slices), other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0)[:, None]
    tl.store(out_ptr + m.to(tl.int64)[None, :] * stride_out_row + n[:, None], total, mask=is_inside)


class Tile(NamedTuple):
    """Rows and outputs of a tile, and how many blocks of columns are on their way: few rows wait for weights alone, and
    tiles of few outputs are more programs that wait at once."""

    block_m: int
    block_n: int
    num_stages: int


TILES = (Tile(16, 16, 6), Tile(32, 32, 6), Tile(64, 64, 4))


def tile_for(num_rows: int) -> Tile:
    """Returns the smallest tile that holds the rows, or the largest."""
    return next((tile for tile in TILES if num_rows <= tile.block_m), TILES[-1])


def chunk_rows(depth: int) -> int:
    """Returns how many rows are transposed at a time: a multiple of every tile's rows, at least one tile."""
    largest = TILES[-1].block_m
    fitting = MAX_TRANSPOSED_BYTES // (4 * max(depth, 1)) // largest * largest
    return max(largest, min(CHUNK_ROWS, fitting))


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Fills out [num_rows, N], which is not empty."""
    rows = chunk_rows(weight.shape[1])
    for first in range(0, out.shape[0], rows):
        launch_slices(x[first : first + rows], weight, bias, out[first : first + rows])


def launch_slices(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Rows that are few enough to be transposed at once."""
    (num_rows, num_outputs), depth = out.shape, weight.shape[1]
    tile = tile_for(num_rows)
    tiles_m = triton.cdiv(num_rows, tile.block_m)
    width, num_slices = tiles_m * tile.block_m, triton.cdiv(depth, SLICE_K)
    if num_slices < 2 or 4 * num_slices * num_outputs * width > MAX_PARTIALS_BYTES:
        multiply(x, weight, bias, out, tile, width)
        return
    partials = out.new_empty((num_slices, num_outputs, width))
    if hopper.takes(x):
        from kernels.linear.fp32.hopper.launch import launch as multiply_few_slices

        multiply_few_slices(x, weight, partials, SLICE_K, BLOCK_K)
    else:
        multiply(x, weight, None, partials, tile, width)
    sum_slices[(triton.cdiv(num_outputs, SUM_BLOCK_N), tiles_m)](
        partials,
        weight if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        num_slices,
        width,
        out.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=SUM_BLOCK_N,
        AHEAD=SLICES_AHEAD,
        HAS_BIAS=bias is not None,
        **overlap_options(x.device),
    )


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    tile: Tile,
    width: int,
) -> None:
    """Fills target: out, or partials [slices, num_outputs, width], to which no bias is added."""
    num_rows, (num_outputs, depth) = x.shape[0], weight.shape
    is_whole = target.dim() == 2
    tiles_m = width // tile.block_m
    options = {"BLOCK_M": tile.block_m, **overlap_options(x.device)}
    transposed = weight.new_empty((depth, width))
    transpose_rows[(triton.cdiv(depth, 64), tiles_m)](
        x, transposed, num_rows, depth, width, x.stride(0), BLOCK_K=64, **options
    )
    multiply_slices[(triton.cdiv(num_outputs, tile.block_n), tiles_m, 1 if is_whole else target.shape[0])](
        transposed,
        weight,
        weight if bias is None else bias,
        target,
        num_rows,
        num_outputs,
        depth,
        width,
        weight.stride(0),
        target.stride(0),
        BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK_K,
        SLICE_K=SLICE_K,
        IS_WHOLE=is_whole,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=tile.num_stages,
        **options,
    )
