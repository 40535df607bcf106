"""rotate_tail in Triton: one program for a block of a token's heads, which touches what turns and nothing else."""

import torch
import triton
import triton.language as tl

from kernels.rotation.triton import rotate_row_tails

# Heads of a program: 16 times 64 elements that turn are the 2 KiB that keep one warp's loads in flight.
BLOCK_H = 16


@triton.jit
def rotate_heads(
    x_ptr,
    positions_ptr,
    cos_sin_ptr,
    stride_token,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    row_ptr = x_ptr + token * stride_token + head * DIM
    rotate_row_tails(row_ptr, angle_ptr + 0 * head, head < HEADS, DIM, HALF, BLOCK_HALF, INVERSE)


def launch(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, inverse: bool) -> None:
    """Turns in place; checked, non-empty arguments."""
    (tokens, heads, dim), half = x.shape, cos_sin.shape[2]
    block = min(BLOCK_H, triton.next_power_of_2(heads))
    with torch.cuda.device_of(x):
        rotate_heads[(tokens * triton.cdiv(heads, block),)](
            x,
            positions,
            cos_sin,
            x.stride(0),
            HEADS=heads,
            DIM=dim,
            HALF=half,
            INVERSE=inverse,
            BLOCK_H=block,
            BLOCK_HALF=triton.next_power_of_2(half),
            # A product that is fused with a sum is rounded once less than torch's two operations.
            enable_fp_fusion=False,
            # One: x is read and written in place, so no other warp may hold a copy of what this one has turned.
            num_warps=1,
        )
