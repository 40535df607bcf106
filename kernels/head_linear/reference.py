"""head_linear in plain torch, in fp32."""

import torch


def head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out, one token after the other: a product's last bits depend on how many rows it has."""
    matrices = weight.float()
    depth, num_outputs = weight.shape[1:]
    for token in range(x.shape[0]):
        row = x[token, :, :depth].float().unsqueeze(1)
        out[token, :, :num_outputs] = torch.bmm(row, matrices).squeeze(1).to(out.dtype)
    out[..., num_outputs:] = x[..., depth:]
