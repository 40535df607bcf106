"""The sizes of a latent attention, as the tensors of a layer tell them.

latents [.., latent + rope]    q [.., heads, nope + rope]    kv_b [heads * (nope + value), latent]
"""

from typing import NamedTuple

import torch

from kernels._checks import KV_DTYPES, check_dense, check_dense_pages, check_tensor
from kernels.errors import KernelArgumentError

__all__ = ["LatentDims", "check_latent_dims", "check_latent_queries", "check_latent_tiles"]

# The widest rows whose tiles fit in shared memory.
MAX_LATENT, MAX_ROPE = 512, 64


class LatentDims(NamedTuple):
    """Elements of a latent, of the rotary part that all heads' keys share, and of a head's own key part and value."""

    latent: int
    rope: int
    nope: int
    value: int

    @property
    def width(self) -> int:
        """Of a row of the cache."""
        return self.latent + self.rope

    @property
    def head(self) -> int:
        """Of a head of q, and of a key."""
        return self.nope + self.rope


def check_latent_dims(q: torch.Tensor, pages: torch.Tensor, kv_b: torch.Tensor) -> LatentDims:
    """Returns the sizes; refuses tensors that do not fit together."""
    check_dense("kv_b", kv_b, (None, None), KV_DTYPES, q.device)
    check_tensor("q", q, (None, None, None), (kv_b.dtype,), q.device)
    check_tensor("pages", pages, (None, None, None), (kv_b.dtype,), q.device)
    heads, rows, latent = q.shape[1], *kv_b.shape
    if heads == 0 or rows == 0 or rows % heads:
        raise KernelArgumentError(f"kv_b: {rows} rows are not a multiple of the {heads} heads of q")
    rope = pages.shape[2] - latent
    if latent == 0 or rope <= 0:
        raise KernelArgumentError(
            f"pages: rows must be wider than the {latent} of a latent (kv_b), got {rope + latent}"
        )
    nope = q.shape[2] - rope
    if nope <= 0:
        raise KernelArgumentError(f"q: heads must be wider than the {rope} that turn (pages), got {q.shape[2]}")
    value = rows // heads - nope
    if value <= 0:
        raise KernelArgumentError(f"kv_b: a head's {rows // heads} rows must be more than the {nope} of its keys (q)")
    return LatentDims(latent, rope, nope, value)


def check_latent_queries(q: torch.Tensor, pages: torch.Tensor, latent: int) -> None:
    """Refuses pages that are not rows of a latent and a rotary part, and absorbed queries of another width."""
    check_tensor("pages", pages, (None, None, None), KV_DTYPES, pages.device)
    check_dense_pages("pages", pages)
    width = pages.shape[2]
    if not 0 < latent < width:
        raise KernelArgumentError(
            f"latent: must be less than the {width} of a row of pages, and positive, got {latent}"
        )
    check_dense("q", q, (None, None, width), (pages.dtype,), pages.device)


def check_latent_tiles(pages: torch.Tensor, latent: int) -> None:
    """Refuses rows that are too wide for the Triton kernels."""
    rope = pages.shape[2] - latent
    if latent > MAX_LATENT or rope > MAX_ROPE:
        raise KernelArgumentError(f"pages: rows must be at most {MAX_LATENT} + {MAX_ROPE}, got {latent} + {rope}")
