"""mamba2_scan in Triton: sizes of steps and sums of decays first, then states pass and outputs follow (block_scan)."""

import math

import torch
import triton
import triton.language as tl

from kernels.block_scan import Mamba2Layer, ScanPlan
from kernels.block_scan.call import BlockScan
from kernels.block_scan.plan import GRID_TOKENS
from kernels.block_scan.triton import load_rows, load_scalars, padded, precision, step_sizes
from kernels.launches import allow_next_launch_and_wait, overlap_options

# Heads of a program that serves a block.
HEADS = 32
# Heads of one group whose scores one program computes, at most.
SHARED_HEADS = 8

_GRID = tl.constexpr(GRID_TOKENS)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows"])
def sum_steps(
    raw_ptr, bias_ptr, a_ptr, sizes_ptr, sums_ptr, cu_blocks_ptr, blocks_ptr, num_rows, least, most, stride_raw,
    H: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    allow_next_launch_and_wait(OVERLAPS)
    block = tl.program_id(0)
    if block < tl.load(cu_blocks_ptr + num_rows):
        first = tl.load(blocks_ptr + block * 2)
        token = tl.arange(0, _GRID)[:, None]
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = head < H
        ok = (token < tl.load(blocks_ptr + block * 2 + 1)) & is_head[None, :]
        at = (first + token).to(tl.int64)
        raw = tl.load(raw_ptr + at * stride_raw + head[None, :], mask=ok, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(bias_ptr + head, mask=is_head, other=0.0).to(tl.float32)[None, :]
        sizes = tl.where(ok, step_sizes(raw, least, most), 0.0)
        sums = tl.cumsum(sizes * tl.load(a_ptr + head, mask=is_head, other=0.0)[None, :], 0)
        tl.store(sizes_ptr + at * H + head[None, :], sizes, mask=ok)
        tl.store(sums_ptr + at * H + head[None, :], sums, mask=ok)


@triton.jit(do_not_specialize=["num_rows"])
def score_blocks(
    c_ptr, b_ptr, sizes_ptr, sums_ptr, scores_ptr, cu_blocks_ptr, blocks_ptr, num_rows, stride_c, stride_b,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
    SHARE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """How much of each token of a block goes into each one's output, for SHARE heads of a group."""
    allow_next_launch_and_wait(OVERLAPS)
    block = tl.program_id(0)
    if block < tl.load(cu_blocks_ptr + num_rows):
        first = tl.load(blocks_ptr + block * 2)
        count = tl.load(blocks_ptr + block * 2 + 1)
        first_head = tl.program_id(1) * SHARE
        c = load_rows(c_ptr, first, count, stride_c, first_head // GROUP, DK, 0, BK)
        b = load_rows(b_ptr, first, count, stride_b, first_head // GROUP, DK, 0, BK)
        products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        token = tl.arange(0, _GRID)
        i, j = token[:, None], token[None, :]
        for head in tl.range(first_head, first_head + SHARE):
            sums = load_scalars(sums_ptr, first, count, H, head)
            sizes = load_scalars(sizes_ptr, first, count, H, head)
            decay = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], float("-inf")))
            at = scores_ptr + (first.to(tl.int64) * H + head) * _GRID + i * (H * _GRID) + j
            tl.store(at, (products * decay * sizes[None, :]).to(c.dtype), mask=i < count)


def score(layer: Mamba2Layer, plan: ScanPlan) -> BlockScan:
    """Returns the plain scan that a layer is."""
    steps = layer.steps
    tokens, heads = steps.raw.shape
    groups, dim_k = layer.b.shape[1:]
    sizes, sums = steps.a.new_empty(2, tokens, heads)
    scores = layer.x.new_empty(tokens, heads, GRID_TOKENS)
    block, options = min(HEADS, triton.next_power_of_2(heads)), overlap_options(layer.x.device)
    with torch.cuda.device_of(layer.x):
        sum_steps[(plan.max_blocks, triton.cdiv(heads, block))](
            steps.raw, steps.a if steps.bias is None else steps.bias, steps.a, sizes, sums,
            plan.cu_blocks, plan.blocks, plan.num_rows, steps.least, steps.most, steps.raw.stride(0),
            H=heads, HAS_BIAS=steps.bias is not None, BLOCK_H=block, num_warps=4, **options,
        )  # fmt: skip
        share = math.gcd(SHARED_HEADS, heads // groups)
        score_blocks[(plan.max_blocks, heads // share)](
            layer.c, layer.b, sizes, sums, scores, plan.cu_blocks, plan.blocks, plan.num_rows,
            layer.c.stride(0), layer.b.stride(0),
            H=heads, GROUP=heads // groups, DK=dim_k, PRECISION=precision(layer.c.dtype), BK=padded(dim_k),
            SHARE=share, num_warps=4, **options,
        )  # fmt: skip
    return BlockScan(
        layer.c, layer.b, layer.x, None, None, sums, sizes, scores, None, layer.states, plan, 1.0,
        by_value=True, skip=layer.skip, gate=layer.gate,
    )  # fmt: skip
