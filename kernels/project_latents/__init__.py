"""project_latents: keys and values of every head from gathered latents, written once.

The product's rows already lie as attention reads them, a head's key part beside its value; the rotary key, which all
heads share, stays where it is and is copied nowhere.

    kv [n, heads, 256]       | k_nope 128 | v 128 |          latents [n, 576]      | latent 512 | k_rope 64 |
"""

from typing import NamedTuple

import torch

from kernels._checks import KV_DTYPES, check_contiguous, check_rows, check_tensor
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.linear import Route, linear

__all__ = ["LATENT", "NOPE", "ROPE", "VALUE", "ProjectedLatents", "project_latents"]

LATENT, ROPE = 512, 64
NOPE, VALUE = 128, 128


class ProjectedLatents(NamedTuple):
    """Views: k_nope and v [n, heads, 128], k_rope [n, 64] for all heads."""

    k_nope: torch.Tensor
    k_rope: torch.Tensor
    v: torch.Tensor


def project_latents(
    latents: torch.Tensor, kv_b: torch.Tensor, *, route: Route = Route.LIBRARY, backend: Backend = Backend.AUTO
) -> ProjectedLatents:
    """latents [n, 512 + 64] through kv_b [heads * (128 + 128), 512]; `route` as in linear.

    The result refers to `latents`: they must not be written before it has been used.
    """
    check_tensor("kv_b", kv_b, (None, LATENT), KV_DTYPES, latents.device)
    check_contiguous("kv_b", kv_b)
    if kv_b.shape[0] == 0 or kv_b.shape[0] % (NOPE + VALUE):
        raise KernelArgumentError(f"kv_b: {kv_b.shape[0]} rows are not a multiple of {NOPE + VALUE}")
    check_tensor("latents", latents, (None, LATENT + ROPE), (kv_b.dtype,), latents.device)
    check_rows("latents", latents)
    kv = linear(latents[:, :LATENT], kv_b, route=route, backend=backend)
    kv = kv.view(latents.shape[0], -1, NOPE + VALUE)
    return ProjectedLatents(kv[..., :NOPE], latents[:, LATENT:], kv[..., NOPE:])
