"""head_linear in plain torch, in fp32."""

import torch


def head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out, one token after the other: a product's last bits depend on how many rows it has."""
    matrices = weight.float()
    for token in range(x.shape[0]):
        out[token] = torch.bmm(x[token].float().unsqueeze(1), matrices).squeeze(1).to(out.dtype)
