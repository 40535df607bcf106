"""mix_streams: a residual of several streams (mHC, DeepSeek V4): what a branch gets of them, and how its output joins.

A token is one row, whose bits depend on nothing else.
"""

import torch

from kernels._checks import KV_DTYPES, check_dense, check_rows, check_tensor
from kernels.backend import Backend, uses_triton
from kernels.errors import KernelArgumentError
from kernels.mix_streams import reference
from kernels.mix_streams.call import Collapsed, MixCall

__all__ = ["Collapsed", "collapse_streams", "expand_streams", "join_streams"]


def collapse_streams(
    streams: torch.Tensor,
    mixes: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    eps: float,
    num_iters: int,
    backend: Backend = Backend.AUTO,
) -> Collapsed:
    """Returns what a branch gets of streams [num_tokens, n, hidden], and how its output goes back.

    mixes fp32 [num_tokens, (2 + n) n], rows may be slices of wider ones, are made of the streams' normed row: n for the
    row that the branch gets, n for its output, n x n for the streams. Each has its factor, scale fp32 [3], and base
    fp32 [(2 + n) n] is added. The last go through a softmax of each row and num_iters rounds of Sinkhorn's division by
    sums of columns and of rows. All is fp32; x is rounded once.
    """
    tokens, n, hidden = _check(streams)
    if num_iters < 1:
        raise KernelArgumentError(f"num_iters: must be positive, got {num_iters}")
    call = MixCall(streams, mixes, base, scale, eps)
    _check_mixes(call, (2 + n) * n, 3)
    post = torch.empty((tokens, n), dtype=torch.float32, device=streams.device)
    comb = torch.empty((tokens, n, n), dtype=torch.float32, device=streams.device)
    made = Collapsed(streams.new_empty((tokens, hidden)), post, comb)
    if streams.numel() and uses_triton(backend, streams):
        from kernels.mix_streams.triton import launch_collapse

        launch_collapse(call, num_iters, made)
    else:
        reference.collapse_streams(call, num_iters, made)
    return made


def expand_streams(
    out: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns the streams [num_tokens, n, hidden] behind a branch that made out [num_tokens, hidden].

    Stream j is post[j] out + the sum of comb[i, j] times stream i, in fp32 and rounded once.
    """
    tokens, n, hidden = _check(streams)
    check_tensor("out", out, (tokens, hidden), (streams.dtype,), streams.device)
    check_rows("out", out)
    check_dense("post", post, (tokens, n), (torch.float32,), streams.device)
    check_dense("comb", comb, (tokens, n, n), (torch.float32,), streams.device)
    expanded = torch.empty_like(streams)
    if streams.numel() and uses_triton(backend, streams):
        from kernels.mix_streams.triton import launch_expand

        launch_expand(out, streams, post, comb, expanded)
    else:
        reference.expand_streams(out, streams, post, comb, expanded)
    return expanded


def join_streams(
    streams: torch.Tensor,
    mixes: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    eps: float,
    backend: Backend = Backend.AUTO,
) -> torch.Tensor:
    """Returns the streams [num_tokens, n, hidden] as one row a token, [num_tokens, hidden], rounded once.

    mixes fp32 [num_tokens, n], rows may be slices of wider ones; base fp32 [n], scale fp32 [1].
    """
    tokens, n, hidden = _check(streams)
    call = MixCall(streams, mixes, base, scale, eps)
    _check_mixes(call, n, 1)
    x = streams.new_empty((tokens, hidden))
    if streams.numel() and uses_triton(backend, streams):
        from kernels.mix_streams.triton import launch_join

        launch_join(call, x)
    else:
        reference.join_streams(call, x)
    return x


def _check(streams: torch.Tensor) -> tuple[int, int, int]:
    check_dense("streams", streams, (None, None, None), KV_DTYPES, streams.device)
    tokens, n, hidden = streams.shape
    return tokens, n, hidden


def _check_mixes(call: MixCall, width: int, num_scales: int) -> None:
    device = call.streams.device
    check_tensor("mixes", call.mixes, (call.streams.shape[0], width), (torch.float32,), device)
    check_rows("mixes", call.mixes)
    check_dense("base", call.base, (width,), (torch.float32,), device)
    check_dense("scale", call.scale, (num_scales,), (torch.float32,), device)
