"""project_latents: keys and values of every head from gathered latents, written once.

The product's rows already lie as attention reads them, a head's key part beside its value; the rotary key, which all
heads share, stays where it is and is copied nowhere.

    kv [n, heads, nope + value]   | k_nope | v |          latents [n, latent + rope]   | latent | k_rope |
"""

from typing import NamedTuple

import torch

from kernels._checks import KV_DTYPES, check_dense, check_lengths, check_rows, check_tensor
from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.linear import Route, linear
from kernels.project_latents import hopper

__all__ = ["ProjectedLatents", "project_latents"]


class ProjectedLatents(NamedTuple):
    """Views: k_nope [n, heads, nope], k_rope [n, rope] for all heads, v [n, heads, value]."""

    k_nope: torch.Tensor
    k_rope: torch.Tensor
    v: torch.Tensor


def project_latents(
    latents: torch.Tensor,
    kv_b: torch.Tensor,
    heads: int,
    nope: int,
    *,
    num_latents: torch.Tensor | None = None,
    route: Route = Route.LIBRARY,
    backend: Backend = Backend.AUTO,
) -> ProjectedLatents:
    """latents [n, latent + rope] through kv_b [heads * (nope + value), latent]; `route` as in linear.

    num_latents int32 [1]: how many rows of latents there are, on the device; what the rows behind them become is not
    defined, and the Gluon kernel does not compute it. It gives the bits of `linear`.

    The result refers to `latents`: they must not be written before it has been used.
    """
    check_dense("kv_b", kv_b, (None, None), KV_DTYPES, latents.device)
    rows, latent = kv_b.shape
    if heads < 1 or nope < 1 or rows % heads or rows // heads <= nope:
        raise KernelArgumentError(f"kv_b: {rows} rows are not {heads} heads with keys of {nope} and values")
    check_tensor("latents", latents, (None, None), (kv_b.dtype,), latents.device)
    check_rows("latents", latents)
    if latents.shape[1] <= latent:
        raise KernelArgumentError(f"latents: rows must be wider than kv_b's {latent}, got {latents.shape[1]}")
    kv = _projected(latents, kv_b, num_latents, route, backend).view(latents.shape[0], heads, rows // heads)
    return ProjectedLatents(kv[..., :nope], latents[:, latent:], kv[..., nope:])


def _projected(
    latents: torch.Tensor, kv_b: torch.Tensor, num_latents: torch.Tensor | None, route: Route, backend: Backend
) -> torch.Tensor:
    """Returns [n, heads * (nope + value)]."""
    if num_latents is not None:
        check_lengths("num_latents", num_latents, 1, latents.device)
        if backend in (Backend.AUTO, Backend.GLUON) and hopper.reason_against(latents, kv_b) is None:
            from kernels.project_latents.hopper.launch import launch

            out = latents.new_empty(latents.shape[0], kv_b.shape[0])
            launch(latents, kv_b, num_latents, out)
            return out
    return linear(latents[:, : kv_b.shape[1]], kv_b, route=route, backend=backend)
