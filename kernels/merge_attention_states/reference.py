"""merge_attention_states in plain torch."""

import torch

EMPTY = float("-inf")


def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights each output by the share of its sum of exponentials."""
    lse_a, lse_b = (torch.where(lse == float("inf"), EMPTY, lse) for lse in (lse_a, lse_b))
    peak = torch.maximum(lse_a, lse_b)
    base = torch.where(peak == EMPTY, 0.0, peak)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = weight_a + weight_b
    merged = _weighted(out_a, weight_a) + _weighted(out_b, weight_b)
    merged = merged / torch.where(total == 0.0, 1.0, total).T.unsqueeze(-1)
    return merged.to(out_a.dtype), base + torch.log(total)


def _weighted(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An empty side's output is never read into the sum: it may hold anything."""
    column = weight.T.unsqueeze(-1)
    return torch.where(column == 0.0, 0.0, out.float() * column)
