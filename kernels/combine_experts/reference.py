"""combine_experts in plain torch."""

import torch

from kernels.backend import Backend
from kernels.gates import times_sigmoid


def combine_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    out: torch.Tensor,
    top_k: int,
) -> None:
    """Fills out; each product and each sum is rounded to fp32. Each token has as many rows as weights; the first top_k
    are summed."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for place in range(top_k):
        total += weights[:, place, None] * rows[place :: weights.shape[1]].float()
    out.copy_(total)
    if shared is not None:
        out += shared if gate is None else times_sigmoid(shared, gate, backend=Backend.REFERENCE)
