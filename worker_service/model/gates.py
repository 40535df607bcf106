"""Gates between a layer's projections, in plain torch: in fp32 and rounded once, of exponents alone.

torch's own sigmoid and softplus give elements at the end of a thread's share other bits on a CPU.
"""

from __future__ import annotations

import torch

# softplus(x) is x from here on, as in torch.
SOFTPLUS_LIMIT = 20.0


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns it in fp32."""
    return x.float().neg().exp_().add_(1.0).reciprocal_()


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Returns x times the sigmoid of the gate, in x's dtype."""
    return (sigmoid(gate) * x.float()).to(x.dtype)


def times_silu(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Returns x times silu of the gate, in x's dtype."""
    wide = gate.float()
    return (sigmoid(wide) * wide * x.float()).to(x.dtype)


def log_decays(logits: torch.Tensor, bias: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Returns a softplus(logits + bias) in fp32, [num_tokens, heads]; bias and a are fp32 [heads]."""
    raw = logits.float() + bias
    small = raw.clamp(max=SOFTPLUS_LIMIT).exp_().log1p_()
    return torch.where(raw > SOFTPLUS_LIMIT, raw, small) * a
