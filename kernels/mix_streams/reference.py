"""mix_streams in plain torch."""

import torch

from kernels.mix_streams.call import Collapsed, MixCall


def collapse_streams(call: MixCall, num_iters: int, made: Collapsed) -> None:
    """Fills x, post and comb of `made`."""
    n, scale, eps = call.streams.shape[1], call.scale, call.eps
    of_row, of_output, of_streams = torch.split(call.mixes, [n, n, n * n], dim=-1)
    row_base, output_base, streams_base = torch.split(call.base, [n, n, n * n])
    join_streams(MixCall(call.streams, of_row, row_base, scale[:1], eps), made.x)
    made.post.copy_(2.0 * _sigmoid(of_output * scale[1] + output_base))
    matrix = (of_streams * scale[2] + streams_base).view(-1, n, n).softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    made.comb.copy_(matrix)


def expand_streams(
    out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, expanded: torch.Tensor
) -> None:
    """Fills expanded."""
    total = post.unsqueeze(-1) * out.unsqueeze(1)
    for stream in range(streams.shape[1]):
        total = total + comb[:, stream].unsqueeze(-1) * streams[:, stream].unsqueeze(1)
    expanded.copy_(total)


def join_streams(call: MixCall, x: torch.Tensor) -> None:
    """Fills x."""
    weights = _sigmoid(call.mixes * call.scale + call.base) + call.eps
    x.copy_((weights.unsqueeze(-1) * call.streams).sum(dim=1))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch's own gives the last elements of a tensor other bits than those before, so a row's would not be its own."""
    return 1.0 / (1.0 + (-x).exp())
