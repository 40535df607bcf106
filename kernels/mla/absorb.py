"""Queries in the latents' own space: a head's key projection multiplied into its query."""

import torch

from kernels.backend import Backend
from kernels.head_linear import head_linear
from kernels.latent_dims import LatentDims


def absorbed_queries(q: torch.Tensor, matrices: torch.Tensor, dims: LatentDims, backend: Backend) -> torch.Tensor:
    """Returns [num_tokens, heads, latent + rope] of q [num_tokens, heads, nope + rope] and kv_b by heads."""
    absorbed = q.new_empty((q.shape[0], q.shape[1], dims.width))
    return head_linear(q, matrices[:, : dims.nope], absorbed, backend=backend)
