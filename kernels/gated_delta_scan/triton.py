"""gated_delta_scan in Triton: each block is made a plain sum of products first, then states pass and outputs follow.

With T the inverse of I + A (see `cpu`), a block adds T beta v - T beta exp(G) k S to its state: the first factor takes
the place of its values, the second one reads the state before it.
"""

import torch
import triton
import triton.language as tl

from kernels.block_scan import GatedDeltaLayer, ScanPlan
from kernels.block_scan.call import BlockScan
from kernels.block_scan.plan import GRID_TOKENS
from kernels.block_scan.triton import inverse_length, launch_scan, load_rows, load_scalars, padded, precision

WARPS = 4

_GRID = tl.constexpr(GRID_TOKENS)


@triton.jit
def joined(inverse, a, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverses of blocks of 2 * SIZE on the diagonal from those of SIZE."""
    i, j = tl.arange(0, _GRID)[:, None], tl.arange(0, _GRID)[None, :]
    between = tl.where((i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE != j // SIZE), a, 0.0)
    through = tl.dot(inverse, between, input_precision=PRECISION)
    return inverse - tl.dot(through, inverse, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(a, PRECISION: tl.constexpr):
    """Returns (I + a)^-1 of a strictly lower [GRID, GRID].

    Blocks of 16 on the diagonal go row by row, all of them at once; two of a size, with what lies between them, are one
    of twice the size: [[X, 0], [B, Y]]^-1 = [[X^-1, 0], [-Y^-1 B X^-1, Y^-1]]. Powers of a would be fewer steps, and
    far larger numbers.
    """
    i, j = tl.arange(0, _GRID)[:, None], tl.arange(0, _GRID)[None, :]
    within = tl.where(i // 16 == j // 16, a, 0.0)
    inverse = tl.zeros((_GRID, _GRID), tl.float32)
    for step in range(1, 16):
        is_row = i % 16 == step
        row = tl.sum(tl.where(is_row, within, 0.0), 0)
        through = row + tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(is_row & (i // 16 == j // 16), -through[None, :], inverse)
    inverse += tl.where(i == j, 1.0, 0.0)
    inverse = joined(inverse, a, 16, PRECISION)
    return joined(inverse, a, 32, PRECISION)


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_rows"])
def solve_blocks(
    k_ptr, v_ptr, g_ptr, beta_ptr, values_ptr, readers_ptr, sums_ptr, cu_blocks_ptr, blocks_ptr, num_rows, norm_eps,
    stride_k, stride_v, stride_g, stride_beta,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    if block < tl.load(cu_blocks_ptr + num_rows):
        first = tl.load(blocks_ptr + block * 2)
        count = tl.load(blocks_ptr + block * 2 + 1)
        token = tl.arange(0, _GRID)
        k = load_rows(k_ptr, first, count, stride_k, head // GROUP, DK, 0, BK)
        beta = load_scalars(beta_ptr, first, count, stride_beta, head)
        sums = tl.cumsum(load_scalars(g_ptr, first, count, stride_g, head), 0)
        of_head = (first + token).to(tl.int64) * HEADS + head
        length = tl.full((_GRID,), 1.0, tl.float32)
        if NORM:
            length = inverse_length(k, norm_eps)
        i, j = token[:, None], token[None, :]
        decay = tl.exp(tl.where(i > j, sums[:, None] - sums[None, :], float("-inf")))
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        inverse = unit_lower_inverse(products * decay * (beta * length)[:, None] * length[None, :], PRECISION)
        inverse = inverse.to(k.dtype)
        tl.store(sums_ptr + of_head, sums, mask=token < count)
        d = tl.arange(0, BK)
        # Once more, rather than kept in registers since its products: they are short of them.
        k = load_rows(k_ptr, first, count, stride_k, head // GROUP, DK, 0, BK)
        reading = (k.to(tl.float32) * (beta * length * tl.exp(sums))[:, None]).to(k.dtype)
        readers = tl.dot(inverse, reading, input_precision=PRECISION).to(k.dtype)
        at = of_head[:, None] * DK + d[None, :]
        tl.store(readers_ptr + at, readers, mask=(token < count)[:, None] & (d < DK)[None, :])
        e = tl.arange(0, BV)
        v = load_rows(v_ptr, first, count, stride_v, head, DV, 0, BV)
        writing = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
        values = tl.dot(inverse, writing, input_precision=PRECISION).to(k.dtype)
        at = of_head[:, None] * DV + e[None, :]
        tl.store(values_ptr + at, values, mask=(token < count)[:, None] & (e < DV)[None, :])


def launch(layer: GatedDeltaLayer, plan: ScanPlan, out: torch.Tensor) -> None:
    """Fills out, writes the states; checked, non-empty arguments."""
    k, v = layer.k, layer.v
    tokens, heads, dim_v = v.shape
    k_heads, dim_k = k.shape[1:]
    values, readers = torch.empty_like(out), v.new_empty(tokens, heads, dim_k)
    sums = v.new_empty((tokens, heads), dtype=torch.float32)
    with torch.cuda.device_of(v):
        solve_blocks[(plan.max_blocks * heads,)](
            k, v, layer.g, layer.beta, values, readers, sums, plan.cu_blocks, plan.blocks, plan.num_rows,
            layer.norm_eps or 0.0, k.stride(0), v.stride(0), layer.g.stride(0), layer.beta.stride(0),
            HEADS=heads, GROUP=heads // k_heads, DK=dim_k, DV=dim_v, NORM=layer.norm_eps is not None,
            PRECISION=precision(v.dtype), BK=padded(dim_k), BV=padded(dim_v), num_warps=WARPS,
        )  # fmt: skip
    scan = BlockScan(
        layer.q, k, values, readers, sums, None, layer.states, plan, layer.scale, layer.norm_eps,
        by_value=False, skip=None, gate=None,
    )  # fmt: skip
    launch_scan(scan, out)
