"""append_latent in Triton: pure traffic, one program for a few rows.

Addresses are 64-bit because a pool may pass 2^31 elements.
"""

import torch
import triton
import triton.language as tl

# A row of 576 is 1152 bytes: two of them keep one warp's loads in flight without idle lanes.
ROWS = 2


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def append_latents(
    latents_ptr,
    rope_keys_ptr,
    pages_ptr,
    slots_ptr,
    num_tokens,
    stride_latents_token,
    stride_rope_keys_token,
    stride_page,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    ok = (slot >= 0)[:, None]
    d = tl.arange(0, BLOCK_RANK)[None, :]
    e = tl.arange(0, BLOCK_ROPE)[None, :]
    latent = tl.load(latents_ptr + (token * stride_latents_token)[:, None] + d, mask=ok & (d < RANK))
    rope_key = tl.load(rope_keys_ptr + (token * stride_rope_keys_token)[:, None] + e, mask=ok & (e < ROPE))
    row = pages_ptr + (slot // PAGE * stride_page + slot % PAGE * (RANK + ROPE))[:, None]
    tl.store(row + d, latent, mask=ok & (d < RANK))
    tl.store(row + RANK + e, rope_key, mask=ok & (e < ROPE))


def launch(latents: torch.Tensor, rope_keys: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    tokens, rank = latents.shape
    rope = rope_keys.shape[1]
    with torch.cuda.device_of(pages):
        append_latents[(triton.cdiv(tokens, ROWS),)](
            latents,
            rope_keys,
            pages,
            slot_mapping,
            tokens,
            latents.stride(0),
            rope_keys.stride(0),
            pages.stride(0),
            RANK=rank,
            ROPE=rope,
            PAGE=pages.shape[1],
            ROWS=ROWS,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_ROPE=triton.next_power_of_2(max(1, rope)),
            num_warps=1,
        )
