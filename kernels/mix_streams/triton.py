"""mix_streams in Triton: one program for a token and a block of its elements; Sinkhorn's rounds in registers, once."""

import torch
import triton
import triton.language as tl

from kernels.mix_streams.call import Collapsed, MixCall
from kernels.softmax.triton import MASKED

# Elements of a program: of 4 streams 8 KiB of bf16, which 4 warps load at once.
BLOCK_D = 1024
WARPS = 4


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def doubly_stochastic(mixes_ptr, base_ptr, scale, eps, num_iters, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns [BLOCK_N, BLOCK_N], rows from; what only fills the tile up is 0."""
    i = tl.arange(0, BLOCK_N)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    ok = (i < N) & (j < N)
    logit = tl.load(mixes_ptr + i * N + j, mask=ok, other=0.0) * scale + tl.load(
        base_ptr + i * N + j, mask=ok, other=0.0
    )
    logit = tl.where(ok, logit, MASKED)
    matrix = tl.exp(logit - tl.max(logit, 1)[:, None])
    matrix = tl.where(ok, matrix / tl.sum(matrix, 1)[:, None] + eps, 0.0)
    matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    for _ in tl.range(1, num_iters):
        matrix = matrix / (tl.sum(matrix, 1)[:, None] + eps)
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
    return matrix


# What changes from batch to batch is not specialised on: a new value must not mean a new compilation.
@triton.jit(do_not_specialize=["num_iters"])
def weigh_streams(
    streams_ptr,
    mixes_ptr,
    base_ptr,
    scale_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    eps,
    num_iters,
    stride_mixes,
    D: tl.constexpr,
    N: tl.constexpr,
    COLLAPSES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    mixes_ptr += token * stride_mixes
    n = tl.arange(0, BLOCK_N)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    mix = tl.load(mixes_ptr + n, mask=n < N, other=0.0) * tl.load(scale_ptr)
    weights = sigmoid(mix + tl.load(base_ptr + n, mask=n < N, other=0.0)) + eps
    ok = (n < N)[:, None] & (d < D)[None, :]
    streams = tl.load(streams_ptr + (token * N + n)[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    x = tl.sum(weights[:, None] * streams, 0)
    tl.store(x_ptr + token * D + d, x.to(x_ptr.dtype.element_ty), mask=d < D)
    if COLLAPSES:  # noqa: SIM102
        if block == 0:
            mix = tl.load(mixes_ptr + N + n, mask=n < N, other=0.0) * tl.load(scale_ptr + 1)
            post = 2.0 * sigmoid(mix + tl.load(base_ptr + N + n, mask=n < N, other=0.0))
            tl.store(post_ptr + token * N + n, post, mask=n < N)
            comb = doubly_stochastic(
                mixes_ptr + 2 * N, base_ptr + 2 * N, tl.load(scale_ptr + 2), eps, num_iters, N, BLOCK_N
            )
            at = n[:, None] * N + n[None, :]
            tl.store(comb_ptr + token * (N * N) + at, comb, mask=(n < N)[:, None] & (n < N)[None, :])


@triton.jit
def spread_output(
    out_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    expanded_ptr,
    stride_out,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    d = tl.program_id(0) % BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = (n < N)[:, None] & (d < D)[None, :]
    streams = tl.load(streams_ptr + (token * N + n)[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + token * stride_out + d, mask=d < D, other=0.0).to(tl.float32)
    for to in tl.static_range(N):
        comb = tl.load(comb_ptr + token * (N * N) + n * N + to, mask=n < N, other=0.0)
        made = tl.load(post_ptr + token * N + to) * out + tl.sum(comb[:, None] * streams, 0)
        tl.store(expanded_ptr + (token * N + to) * D + d, made.to(expanded_ptr.dtype.element_ty), mask=d < D)


def launch_collapse(call: MixCall, num_iters: int, made: Collapsed) -> None:
    """Fills x, post and comb of `made`; checked, non-empty arguments."""
    _weigh(call, num_iters, made, collapses=True)


def launch_join(call: MixCall, x: torch.Tensor) -> None:
    """Fills x; checked, non-empty arguments."""
    _weigh(call, 1, Collapsed(x, x, x), collapses=False)


def _weigh(call: MixCall, num_iters: int, made: Collapsed, collapses: bool) -> None:
    with torch.cuda.device_of(call.streams):
        weigh_streams[_grid(call.streams)](
            call.streams,
            call.mixes,
            call.base,
            call.scale,
            *made,
            call.eps,
            num_iters,
            call.mixes.stride(0),
            **_sizes(call.streams),
            COLLAPSES=collapses,
            num_warps=WARPS,
        )


def launch_expand(
    out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, expanded: torch.Tensor
) -> None:
    """Fills expanded; checked, non-empty arguments."""
    with torch.cuda.device_of(streams):
        spread_output[_grid(streams)](
            out, streams, post, comb, expanded, out.stride(0), **_sizes(streams), num_warps=WARPS
        )


def _grid(streams: torch.Tensor) -> tuple[int]:
    return (streams.shape[0] * triton.cdiv(streams.shape[2], BLOCK_D),)


def _sizes(streams: torch.Tensor) -> dict[str, int]:
    _, n, hidden = streams.shape
    return {"D": hidden, "N": n, "BLOCK_N": triton.next_power_of_2(n), "BLOCK_D": BLOCK_D}
