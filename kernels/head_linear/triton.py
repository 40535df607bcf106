"""head_linear in Triton: one program for one head, a tile of its tokens and a tile of its columns.

One fixed tile and one order of sums, whatever the number of tokens.
"""

import torch
import triton
import triton.language as tl

BLOCK_T = 64
BLOCK_N = 64
BLOCK_K = 64


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def multiply_heads(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    stride_x_token,
    stride_x_head,
    stride_weight_head,
    stride_weight_k,
    stride_weight_n,
    stride_out_token,
    stride_out_head,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(2).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    ok = (token < num_tokens)[:, None]
    x_at = token[:, None] * stride_x_token + head * stride_x_head + depth[None, :]
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
    out_at = token[:, None] * stride_out_token + head * stride_out_head + column[None, :]
    if N % BLOCK_N:
        ok = ok & (column < N)[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=ok)


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Launches over checked, non-empty arguments."""
    tokens, heads, depth = x.shape
    with torch.cuda.device_of(x):
        multiply_heads[(heads, triton.cdiv(out.shape[2], BLOCK_N), triton.cdiv(tokens, BLOCK_T))](
            x,
            weight,
            out,
            tokens,
            x.stride(0),
            x.stride(1),
            weight.stride(0),
            weight.stride(1),
            weight.stride(2),
            out.stride(0),
            out.stride(1),
            K=depth,
            N=out.shape[2],
            BLOCK_T=BLOCK_T,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            num_warps=4,
        )
