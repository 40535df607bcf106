"""The recurrences of states, one token after the other, in fp32: the truth for scans, and what updates are on a CPU.

Products have one shape for each layer, so a token's bits depend on its row alone.
"""

import torch

from kernels.block_scan.layers import GatedDeltaLayer, Mamba2Layer


def delta_tokens(layer: GatedDeltaLayer, tokens: slice, state: torch.Tensor) -> torch.Tensor:
    """Returns [num_tokens, heads, dv] of the gated delta rule, and brings the state [heads, dk, dv] up to date.

    S <- exp(g) S;  S <- S + k (beta (v - k S));  o = scale q S, where g is of a head or of each row of its S
    """
    group = layer.v.shape[1] // layer.k.shape[1]
    q, k = (unit(rows[tokens].float(), layer.norm_eps).repeat_interleave(group, 1) for rows in (layer.q, layer.k))
    q, v, g, beta = q * layer.scale, layer.v[tokens].float(), layer.g[tokens].float(), layer.beta[tokens].float()
    out = torch.empty_like(v)
    for token in range(v.shape[0]):
        state *= g[token].exp().view(g.shape[1], -1, 1)
        error = v[token, :, None] - k[token, :, None] @ state
        state += k[token, :, :, None] * (error * beta[token, :, None, None])
        out[token] = (q[token, :, None] @ state)[:, 0]
    return out


def unit(rows: torch.Tensor, norm_eps: float | None) -> torch.Tensor:
    """Returns the rows, fp32, divided by the root of their sum of squares plus `norm_eps`; None: as they are."""
    if norm_eps is None:
        return rows
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + norm_eps)


def ssd_tokens(layer: Mamba2Layer, tokens: slice, state: torch.Tensor) -> torch.Tensor:
    """Returns [num_tokens, heads, dim] of Mamba2's recurrence, and brings the state [heads, dim, d_state] up to date.

    S <- exp(dt a) S + (dt x) b;  y = S c + skip x,  times silu(gate)
    """
    group = layer.x.shape[1] // layer.b.shape[1]
    b, c = (rows[tokens].float().repeat_interleave(group, 1) for rows in (layer.b, layer.c))
    x, dt = layer.x[tokens].float(), layer.steps.sizes(tokens)
    g = dt * layer.steps.a
    out = torch.empty_like(x)
    for token in range(x.shape[0]):
        state *= g[token].exp()[:, None, None]
        state += (x[token] * dt[token, :, None])[:, :, None] * b[token, :, None, :]
        out[token] = (state @ c[token, :, :, None])[:, :, 0]
    return finished(layer, tokens, out)


def finished(layer: Mamba2Layer, tokens: slice, y: torch.Tensor) -> torch.Tensor:
    """Returns y [num_tokens, heads, dim], fp32, with `skip` x besides, through silu of the gate."""
    if layer.skip is not None:
        y = y + layer.x[tokens].float() * layer.skip[:, None]
    if layer.gate is not None:
        wide = layer.gate[tokens].float()
        y = y * (wide / wide.neg().exp_().add_(1.0))
    return y
