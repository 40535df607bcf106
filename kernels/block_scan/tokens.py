"""The recurrences of states, one token after the other, in fp32: the truth for scans, and what updates are on a CPU.

Products have one shape for each layer, so a token's bits depend on its row alone.
"""

import torch


def delta_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Returns [num_tokens, heads, dv] of the gated delta rule, and brings the state [heads, dk, dv] up to date.

    q and k [num_tokens, heads, dk] as they are used, v [num_tokens, heads, dv], g and beta [num_tokens, heads]:

        S <- exp(g) S;  S <- S + k (beta (v - k S));  o = q S
    """
    out = torch.empty_like(v)
    for token in range(v.shape[0]):
        state *= g[token].exp()[:, None, None]
        error = v[token, :, None] - k[token, :, None] @ state
        state += k[token, :, :, None] * (error * beta[token, :, None, None])
        out[token] = (q[token, :, None] @ state)[:, 0]
    return out


def unit(rows: torch.Tensor, norm_eps: float | None) -> torch.Tensor:
    """Returns the rows, fp32, divided by the root of their sum of squares plus `norm_eps`; None: as they are."""
    if norm_eps is None:
        return rows
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + norm_eps)


def ssd_tokens(
    c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Returns [num_tokens, heads, dim] of Mamba2's recurrence, and brings the state [heads, dim, d_state] up to date.

    b and c [num_tokens, heads, d_state], x [num_tokens, heads, dim], dt and g [num_tokens, heads]:

        S <- exp(g) S + (dt x) b;  y = S c
    """
    out = torch.empty_like(x)
    for token in range(x.shape[0]):
        state *= g[token].exp()[:, None, None]
        state += (x[token] * dt[token, :, None])[:, :, None] * b[token, :, None, :]
        out[token] = (state @ c[token, :, :, None])[:, :, 0]
    return out


def finished(y: torch.Tensor, x: torch.Tensor, skip: torch.Tensor | None, gate: torch.Tensor | None) -> torch.Tensor:
    """Returns y [num_tokens, heads, dim], fp32, with `skip` x besides, through silu of the gate."""
    if skip is not None:
        y = y + x * skip[:, None]
    if gate is not None:
        wide = gate.float()
        y = y * (wide / wide.neg().exp_().add_(1.0))
    return y
