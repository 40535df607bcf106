"""merge_attention_states in Triton: one program for one token and a block of heads.

Knows nothing of keys. An empty side is selected away, never multiplied by 0: what it holds may be NaN.
"""

import torch
import triton
import triton.language as tl


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
    heads,
    stride_a_token,
    stride_a_head,
    stride_b_token,
    stride_b_head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    row_ok = head < heads
    ok = row_ok[:, None] & (d < D)
    lse_a = tl.load(lse_a_ptr + head * num_tokens + token, mask=row_ok, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + head * num_tokens + token, mask=row_ok, other=float("-inf"))
    a = tl.load(a_ptr + token * stride_a_token + head[:, None] * stride_a_head + d, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * stride_b_token + head[:, None] * stride_b_head + d, mask=ok, other=0.0).to(tl.float32)
    empty_a = (lse_a == float("inf")) | (lse_a == float("-inf"))
    empty_b = (lse_b == float("inf")) | (lse_b == float("-inf"))
    safe_a = tl.where(empty_a, 0.0, lse_a)
    safe_b = tl.where(empty_b, 0.0, lse_b)
    peak = tl.maximum(safe_a, safe_b)
    weight_a = tl.exp(safe_a - peak)
    weight_b = tl.exp(safe_b - peak)
    total = weight_a + weight_b
    merged = tl.div_rn(a * weight_a[:, None] + b * weight_b[:, None], total[:, None])
    merged = tl.where(empty_b[:, None], a, tl.where(empty_a[:, None], b, merged))
    merged = tl.where((empty_a & empty_b)[:, None], 0.0, merged)
    lse = tl.where(empty_b, lse_a, tl.where(empty_a, lse_b, peak + tl.log(total)))
    lse = tl.where(empty_a & empty_b, float("-inf"), lse)
    row = (token * heads + head)[:, None]
    tl.store(out_ptr + row * D + d, merged.to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(lse_ptr + head * num_tokens + token, lse, mask=row_ok)


def launch(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches over checked, non-empty arguments."""
    tokens, heads, dim = out_a.shape
    out = torch.empty((tokens, heads, dim), dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty_like(lse_a)
    block = min(triton.next_power_of_2(heads), 8)
    with torch.cuda.device_of(out_a):
        merge_rows[(tokens, triton.cdiv(heads, block))](
            out,
            lse,
            out_a,
            lse_a,
            out_b,
            lse_b,
            tokens,
            heads,
            out_a.stride(0),
            out_a.stride(1),
            out_b.stride(0),
            out_b.stride(1),
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_H=block,
            num_warps=2,
        )
    return out, lse
