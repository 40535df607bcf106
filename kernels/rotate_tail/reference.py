"""rotate_tail in plain torch."""

import torch

from kernels.rotation.reference import turned_tail


def rotate_tail(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, inverse: bool) -> None:
    """Turns the last elements of each head in place."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(2).unbind(1)
    tail = x[..., -2 * cos.shape[-1] :]
    tail.copy_(turned_tail(tail, cos, -sin if inverse else sin))
