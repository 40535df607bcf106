"""head_linear in Triton: tiles of tokens and columns of one head. An output is one sum over the depth, in the same
order in tiles of any size: its bits do not depend on them.

    few rows                    one program for a tile: a launch takes as long as reading the matrices
    more, or much depth         one program for a larger tile
    many, and little depth      a program holds the part of a matrix that makes a block of columns and goes through
                                tiles of tokens; the next rows are on their way while it stores

Columns that rows carry are one more block, behind those of the outputs. On Hopper a launch of few tokens begins while
the one before it ends, and lets the next one begin.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launches import allow_next_launch_and_wait, overlap_options

BLOCK_K = 64
# Rows of all heads up to which small tiles are best, and from which programs hold their part of a matrix: 2,048 tokens
# of 128 heads, 128 deep, take 145 us so and 167 in large tiles, of 16 heads 28.7 and 25.8 (H200).
FEW_ROWS, MANY_ROWS = 8192, 65536
# Depth of which a program can hold its part of a matrix beside several tiles of rows.
HELD_DEPTH = 256


class Tile(NamedTuple):
    """Tokens and columns of a product, and its warps."""

    tokens: int
    columns: int
    warps: int


FEW, HELD, LARGE = Tile(64, 64, 4), Tile(64, 128, 4), Tile(128, 128, 8)
# Tiles of rows on their way to a program that holds its matrix, and tiles that it goes through at most.
HELD_STAGES, HELD_TILES = 4, 16


@triton.jit
def copy_carried(token, num_tokens, x_ptr, out_ptr, K: tl.constexpr, N: tl.constexpr, CARRIED: tl.constexpr,
                 BLOCK_C: tl.constexpr, stride_x_token, stride_out_token):  # fmt: skip
    """Copies what rows of one head carry behind K to behind N; the pointers are the head's."""
    column = tl.arange(0, BLOCK_C)[None, :]
    ok = (token < num_tokens)[:, None] & (column < CARRIED)
    value = tl.load(x_ptr + token[:, None] * stride_x_token + K + column, mask=ok)
    tl.store(out_ptr + token[:, None] * stride_out_token + N + column, value, mask=ok)


@triton.jit
def store_outputs(acc, token, column, num_tokens, out_ptr, stride_out_token, N: tl.constexpr):
    ok = (token < num_tokens)[:, None] & (column < N)[None, :]
    tl.store(out_ptr + token[:, None] * stride_out_token + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=ok)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def multiply_heads(
    x_ptr, weight_ptr, out_ptr, num_tokens, stride_x_token, stride_x_head, stride_weight_head, stride_weight_k,
    stride_weight_n, stride_out_token, stride_out_head,
    K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CARRIED: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs [blocks of columns, tiles of tokens, heads]: the first share a tile of rows, the second a matrix."""
    allow_next_launch_and_wait(OVERLAPS)
    N_BLOCKS: tl.constexpr = tl.cdiv(N, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_ptr += head * stride_x_head
    out_ptr += head * stride_out_head
    if tl.program_id(0) == N_BLOCKS:
        copy_carried(token, num_tokens, x_ptr, out_ptr, K, N, CARRIED, BLOCK_C, stride_x_token, stride_out_token)
    else:
        ok = (token < num_tokens)[:, None]
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        x_at = token[:, None] * stride_x_token + depth[None, :]
        weight_at = head * stride_weight_head + depth[:, None] * stride_weight_k + column[None, :] * stride_weight_n
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=3):
            if K % BLOCK_K == 0 and N % BLOCK_N == 0:
                x = tl.load(x_ptr + x_at + k, mask=ok, other=0.0)
                weight = tl.load(weight_ptr + weight_at + k * stride_weight_k)
            else:
                has_k = depth < K - k
                x = tl.load(x_ptr + x_at + k, mask=ok & has_k[None, :], other=0.0)
                has_weight = has_k[:, None] & (column < N)[None, :]
                weight = tl.load(weight_ptr + weight_at + k * stride_weight_k, mask=has_weight, other=0.0)
            acc = tl.dot(x, weight, acc)
        store_outputs(acc, token, column, num_tokens, out_ptr, stride_out_token, N)


@triton.jit(do_not_specialize=["num_tokens", "tiles"])
def multiply_held(
    x_ptr, weight_ptr, out_ptr, num_tokens, tiles, stride_x_token, stride_x_head, stride_weight_head, stride_weight_k,
    stride_weight_n, stride_out_token, stride_out_head,
    K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CARRIED: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs [blocks of columns, ranges of `tiles` tiles of tokens, heads]."""
    N_BLOCKS: tl.constexpr = tl.cdiv(N, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * tiles * BLOCK_T
    stop = tl.minimum(first + tiles * BLOCK_T, num_tokens)
    x_ptr += head * stride_x_head
    out_ptr += head * stride_out_head
    row = tl.arange(0, BLOCK_T)
    if tl.program_id(0) == N_BLOCKS:
        for start in tl.range(first, stop, BLOCK_T):
            token = (start + row).to(tl.int64)
            copy_carried(token, num_tokens, x_ptr, out_ptr, K, N, CARRIED, BLOCK_C, stride_x_token, stride_out_token)
    else:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        weight_at = head * stride_weight_head + depth[:, None] * stride_weight_k + column[None, :] * stride_weight_n
        weights = ()
        for k in tl.static_range(0, K, BLOCK_K):
            has_weight = (depth < K - k)[:, None] & (column < N)[None, :]
            weights += (tl.load(weight_ptr + weight_at + k * stride_weight_k, mask=has_weight, other=0.0),)  # type: ignore
        for start in tl.range(first, stop, BLOCK_T, num_stages=STAGES):
            token = (start + row).to(tl.int64)
            acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            for k in tl.static_range(0, K, BLOCK_K):
                ok = (token < num_tokens)[:, None] & (depth < K - k)[None, :]
                x = tl.load(x_ptr + token[:, None] * stride_x_token + (k + depth)[None, :], mask=ok, other=0.0)
                acc = tl.dot(x, weights[k // BLOCK_K], acc)
            store_outputs(acc, token, column, num_tokens, out_ptr, stride_out_token, N)


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    tokens, heads = x.shape[:2]
    depth, num_outputs = weight.shape[1:]
    carried = x.shape[2] - depth
    holds = tokens * heads >= MANY_ROWS and tokens > FEW.tokens and depth <= HELD_DEPTH
    tile = HELD if holds else FEW if tokens <= FEW.tokens or tokens * heads <= FEW_ROWS else LARGE
    blocks, tiles = triton.cdiv(num_outputs, tile.columns) + (carried > 0), triton.cdiv(tokens, tile.tokens)
    strides = (x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1))
    constants = {
        "K": depth, "N": num_outputs, "BLOCK_T": tile.tokens, "BLOCK_N": tile.columns, "BLOCK_K": BLOCK_K,
        "CARRIED": carried, "BLOCK_C": triton.next_power_of_2(max(carried, 1)), "num_warps": tile.warps,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        if holds:
            grid = (blocks, triton.cdiv(tiles, HELD_TILES), heads)
            multiply_held[grid](x, weight, out, tokens, HELD_TILES, *strides, **constants, STAGES=HELD_STAGES)
        else:
            options = overlap_options(x.device, when=tokens <= FEW.tokens)
            grid = (blocks, tiles, heads)
            multiply_heads[grid](x, weight, out, tokens, *strides, **constants, **options)
