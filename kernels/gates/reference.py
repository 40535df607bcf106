"""Gates in plain torch, of exponents alone: torch's own sigmoid and softplus give elements at the end of a thread's
share other bits on a CPU."""

import torch

# softplus(x) is x from here on, as in torch.
SOFTPLUS_LIMIT = 20.0


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out."""
    out.copy_(_sigmoid(gate) * x.float())


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor, out: torch.Tensor, silu: bool
) -> None:
    """Fills out."""
    wide, logits = x.float(), gate.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    out.copy_(normed.flatten(1) * (logits * _sigmoid(logits) if silu else _sigmoid(logits)))


def delta_gates(
    decay: torch.Tensor, beta: torch.Tensor, bias: torch.Tensor, a: torch.Tensor, g: torch.Tensor, betas: torch.Tensor
) -> None:
    """Fills g and betas."""
    raw = decay.float() + bias
    small = raw.clamp(max=SOFTPLUS_LIMIT).exp_().log1p_()
    torch.mul(torch.where(raw > SOFTPLUS_LIMIT, raw, small), a.repeat_interleave(g.shape[1] // a.shape[0]), out=g)
    betas.copy_(_sigmoid(beta))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.float().neg().exp_().add_(1.0).reciprocal_()
