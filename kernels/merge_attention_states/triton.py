"""merge_attention_states in Triton: one program for a few tokens and a block of heads.

An empty side is selected away, never multiplied by 0: what it holds may be NaN. A program takes eight tokens because a
log-sum-exp's neighbour in memory is the next token's: eight of them fill a sector.
"""

import torch
import triton
import triton.language as tl

BLOCK_H = 1
BLOCK_T = 8
NUM_WARPS = 4


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def merge_rows(
    out_ptr,
    lse_ptr,
    a_ptr,
    lse_a_ptr,
    b_ptr,
    lse_b_ptr,
    num_tokens,
    stride_a_token,
    stride_a_head,
    stride_b_token,
    stride_b_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    head = (tl.program_id(0) % blocks * BLOCK_H + row % BLOCK_H).to(tl.int64)
    token = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + row // BLOCK_H
    d = tl.arange(0, BLOCK_D)[None, :]
    row_ok = (head < HEADS) & (token < num_tokens)
    ok = row_ok[:, None] & (d < D)
    lse_at = head * num_tokens + token
    lse_a = tl.load(lse_a_ptr + lse_at, mask=row_ok, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + lse_at, mask=row_ok, other=float("-inf"))
    a = tl.load(a_ptr + (token * stride_a_token + head * stride_a_head)[:, None] + d, mask=ok, other=0.0)
    b = tl.load(b_ptr + (token * stride_b_token + head * stride_b_head)[:, None] + d, mask=ok, other=0.0)
    empty_a = (lse_a == float("inf")) | (lse_a == float("-inf"))
    empty_b = (lse_b == float("inf")) | (lse_b == float("-inf"))
    peak = tl.maximum(tl.where(empty_a, float("-inf"), lse_a), tl.where(empty_b, float("-inf"), lse_b))
    base = tl.where(empty_a & empty_b, 0.0, peak)
    weight_a = tl.where(empty_a, 0.0, tl.exp(lse_a - base))
    weight_b = tl.where(empty_b, 0.0, tl.exp(lse_b - base))
    total = weight_a + weight_b
    # Divided once a row, not once an element: a side alone has a share of exactly 1.
    share = 1.0 / tl.where(empty_a & empty_b, 1.0, total)
    a = tl.where(empty_a[:, None], 0.0, a).to(tl.float32)
    b = tl.where(empty_b[:, None], 0.0, b).to(tl.float32)
    merged = a * (weight_a * share)[:, None] + b * (weight_b * share)[:, None]
    lse = tl.where(empty_b, lse_a, tl.where(empty_a, lse_b, peak + tl.log(total)))
    lse = tl.where(empty_a & empty_b, float("-inf"), lse)
    tl.store(out_ptr + ((token * HEADS + head) * D)[:, None] + d, merged.to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(lse_ptr + lse_at, lse, mask=row_ok)


def launch(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches over checked, non-empty arguments."""
    tokens, heads, dim = out_a.shape
    out = torch.empty((tokens, heads, dim), dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty_like(lse_a)
    block_h = min(triton.next_power_of_2(heads), BLOCK_H)
    with torch.cuda.device_of(out_a):
        merge_rows[(triton.cdiv(heads, block_h) * triton.cdiv(tokens, BLOCK_T),)](
            out,
            lse,
            out_a,
            lse_a,
            out_b,
            lse_b,
            tokens,
            out_a.stride(0),
            out_a.stride(1),
            out_b.stride(0),
            out_b.stride(1),
            HEADS=heads,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_H=block_h,
            BLOCK_T=BLOCK_T,
            num_warps=NUM_WARPS,
        )
    return out, lse
