"""rms_norm in plain torch."""

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    """Fills out, and total with x + residual where there is one."""
    if residual is not None and total is not None:
        x = torch.add(x, residual, out=total)
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float())
