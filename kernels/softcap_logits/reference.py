"""softcap_logits in plain torch."""

import torch


def softcap_logits(logits: torch.Tensor, cap: float, out: torch.Tensor) -> None:
    """Fills out."""
    out.copy_((logits.float() / cap).tanh_().mul_(cap))
