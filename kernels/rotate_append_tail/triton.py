"""rotate_append_tail in Triton: pure traffic, the tails of a token's queries in blocks of heads and its key.

head of q, key    0            DIM - 2 HALF            DIM
                  | stays      | pairs that turn       |
"""

import torch
import triton
import triton.language as tl

from kernels.rotate_append_tail.call import RotateAppendTailCall
from kernels.rotation.triton import rotate_row_tails, store_normed_tail

# Heads of a program: 16 times 64 elements that turn are the 2 KiB that keep one warp's loads in flight.
BLOCK_H = 16


@triton.jit
def rotate_tails(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    norm_ptr,
    pages_ptr,
    slots_ptr,
    eps,
    stride_q_token,
    stride_k_token,
    stride_page,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    # A token's blocks are neighbours in launch order: its row is read in one run.
    block = tl.program_id(0) % (Q_BLOCKS + 1)
    token = (tl.program_id(0) // (Q_BLOCKS + 1)).to(tl.int64)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    if block < Q_BLOCKS:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        row_ptr = q_ptr + token * stride_q_token + head * DIM
        rotate_row_tails(row_ptr, angle_ptr + 0 * head, head < HEADS, DIM, HALF, BLOCK_HALF, False)
    else:
        slot = tl.load(slots_ptr + token)
        d = tl.arange(0, BLOCK_DIM)
        wide = tl.load(k_ptr + token * stride_k_token + d, mask=d < DIM, other=0.0).to(tl.float32)
        page_row = pages_ptr + slot // PAGE * stride_page + slot % PAGE * DIM
        store_normed_tail(wide, page_row, norm_ptr, angle_ptr, eps, slot >= 0, DIM, HALF, BLOCK_DIM)


def launch(call: RotateAppendTailCall) -> None:
    """Turns q in place and fills the slots; checked, non-empty arguments."""
    tokens, heads, dim = call.q.shape
    half = call.turned // 2
    block = min(BLOCK_H, triton.next_power_of_2(heads))
    with torch.cuda.device_of(call.pages):
        rotate_tails[(tokens * (triton.cdiv(heads, block) + 1),)](
            call.q,
            call.k,
            call.positions,
            call.cos_sin,
            call.norm,
            call.pages,
            call.slot_mapping,
            call.eps,
            call.q.stride(0),
            call.k.stride(0),
            call.pages.stride(0),
            HEADS=heads,
            DIM=dim,
            HALF=half,
            PAGE=call.pages.shape[1],
            BLOCK_H=block,
            BLOCK_DIM=triton.next_power_of_2(dim),
            BLOCK_HALF=triton.next_power_of_2(half),
            # A product that is fused with a sum is rounded once less than torch's two operations.
            enable_fp_fusion=False,
            # One: q is read and written in place, so no other warp may hold a copy of what this one has turned.
            num_warps=1,
        )
