"""rotate_append_latent in Triton: pure traffic, a token's rotary queries in blocks of heads and its row of the cache.

Addresses are 64-bit because a pool may pass 2^31 elements.

    head of q       0         NOPE     NOPE + HALF           kv       0           LATENT   LATENT + HALF
                    | stays   | first  | second |                     | latent    | first  | second |
"""

import torch
import triton
import triton.language as tl

from kernels.launches import allow_next_launch_and_wait, overlap_options
from kernels.rotate_append_latent.call import RotateAppendLatentCall
from kernels.rotation.triton import load_part, normalise_part, squares, store_part, turned

# Heads of a program: 16 times 64 elements that turn are the 2 KiB that keep one warp's loads in flight.
BLOCK_H = 16


@triton.jit
def append_row(
    kv_row,
    page_row,
    angle_ptr,
    norm_ptr,
    eps,
    row_ok,
    kept,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Latents of rows [n], normalised, and their rotary keys, turned if there is a table, into rows of pages."""
    latent = load_part(kv_row, row_ok, 0, LATENT, BLOCK_LATENT)
    first = load_part(kv_row, row_ok, LATENT, HALF, BLOCK_HALF)
    second = load_part(kv_row, row_ok, LATENT + HALF, HALF, BLOCK_HALF)
    scale = tl.rsqrt(squares(latent) / LATENT + eps)
    latent = normalise_part(latent, scale, norm_ptr, 0, LATENT, BLOCK_LATENT)
    if TURNS:
        first, second = turned(first, second, angle_ptr, row_ok, HALF, BLOCK_HALF)
    store_part(page_row, kept, latent, 0, LATENT, BLOCK_LATENT)
    store_part(page_row, kept, first, LATENT, HALF, BLOCK_HALF)
    store_part(page_row, kept, second, LATENT + HALF, HALF, BLOCK_HALF)


@triton.jit
def rotate_latents(
    q_ptr,
    kv_ptr,
    positions_ptr,
    cos_sin_ptr,
    norm_ptr,
    pages_ptr,
    slots_ptr,
    eps,
    stride_q_token,
    stride_kv_token,
    stride_page,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    TURNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    allow_next_launch_and_wait(OVERLAPS)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H if TURNS else 0
    # A token's blocks are neighbours in launch order: its row is read in one run.
    block = tl.program_id(0) % (Q_BLOCKS + 1)
    token = (tl.program_id(0) // (Q_BLOCKS + 1)).to(tl.int64)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    if block < Q_BLOCKS:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        row_ok = head < HEADS
        row_ptr = q_ptr + token * stride_q_token + head * (NOPE + 2 * HALF)
        first = load_part(row_ptr, row_ok, NOPE, HALF, BLOCK_HALF)
        second = load_part(row_ptr, row_ok, NOPE + HALF, HALF, BLOCK_HALF)
        first, second = turned(first, second, angle_ptr + 0 * head, row_ok, HALF, BLOCK_HALF)
        store_part(row_ptr, row_ok, first, NOPE, HALF, BLOCK_HALF)
        store_part(row_ptr, row_ok, second, NOPE + HALF, HALF, BLOCK_HALF)
    else:
        one = tl.arange(0, 1)
        slot = tl.load(slots_ptr + token)
        page_row = pages_ptr + slot // PAGE * stride_page + slot % PAGE * (LATENT + 2 * HALF)
        append_row(
            kv_ptr + token * stride_kv_token + one, page_row + one, angle_ptr + one, norm_ptr, eps,
            one == 0, (one == 0) & (slot >= 0), LATENT, HALF, TURNS, BLOCK_LATENT, BLOCK_HALF,
        )  # fmt: skip


def launch(call: RotateAppendLatentCall) -> None:
    """Turns q in place and fills the slots; checked, non-empty arguments."""
    tokens, heads, dim = call.q.shape
    block_h = min(BLOCK_H, triton.next_power_of_2(heads))
    half, turns = call.rope // 2, call.cos_sin is not None
    with torch.cuda.device_of(call.pages):
        rotate_latents[(tokens * (turns * triton.cdiv(heads, block_h) + 1),)](
            call.q,
            call.kv,
            call.positions,
            call.norm if call.cos_sin is None else call.cos_sin,
            call.norm,
            call.pages,
            call.slot_mapping,
            call.eps,
            call.q.stride(0),
            call.kv.stride(0),
            call.pages.stride(0),
            HEADS=heads,
            NOPE=dim - call.rope,
            LATENT=call.latent,
            HALF=half,
            TURNS=turns,
            PAGE=call.pages.shape[1],
            BLOCK_H=block_h,
            BLOCK_LATENT=triton.next_power_of_2(call.latent),
            BLOCK_HALF=triton.next_power_of_2(half),
            # A product that is fused with a sum is rounded once less than torch's two operations.
            enable_fp_fusion=False,
            # One: q is read and written in place, so no other warp may hold a copy of what this one has turned.
            num_warps=1,
            **overlap_options(call.q.device),
        )
