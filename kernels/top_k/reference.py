"""top_k in plain torch, which a worker without a GPU serves with: one row after the other."""

import torch

from kernels.errors import KernelArgumentError

_LAST = 0xFFFFFFFF


def top_k(logits: torch.Tensor, num_keys: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out."""
    k = out.shape[1]
    out.fill_(-1)
    for row, count in enumerate(num_keys.tolist()):
        if not 0 <= count <= logits.shape[1]:
            raise KernelArgumentError(f"row {row}: has {count} keys (max_keys {logits.shape[1]})")
        if count <= k:
            out[row, :count] = torch.arange(count, dtype=torch.int32, device=out.device)
        else:
            out[row] = _ranked(logits[row, :count]).topk(k, sorted=False).indices.sort().values


def _ranked(logits: torch.Tensor) -> torch.Tensor:
    """int64, no two alike: in the order of the logits, of equals the lower position is larger."""
    finite = torch.where(logits.isnan(), float("-inf"), logits)
    bits = (finite + 0.0).view(torch.int32)  # -0 becomes 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (order << 32) + (_LAST - torch.arange(logits.shape[-1], device=logits.device))
