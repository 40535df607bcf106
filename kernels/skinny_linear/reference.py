"""The truth for skinny_linear: a product in fp32, rounded once.

Knows no parts: it adds up in whatever order torch does.
"""

import torch


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    product = x.float() @ weight.float().t()
    out.copy_(product if bias is None else product + bias.float())
