"""The truth for linear: a product in fp32 (fp64 for fp32 inputs), rounded once."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = torch.float64 if x.dtype is torch.float32 else torch.float32
    product = x.to(wide) @ weight.to(wide).t()
    return (product if bias is None else product + bias.to(wide)).to(x.dtype)
