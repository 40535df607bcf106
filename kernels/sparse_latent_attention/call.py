"""The checked arguments of one sparse_latent_attention call."""

from typing import NamedTuple

import torch

from kernels.key_rows import KeyRows

__all__ = ["SparseLatentCall"]


class SparseLatentCall(NamedTuple):
    """Queries in the latents' space, pages, and the positions that each query attends to."""

    q: torch.Tensor
    pages: torch.Tensor
    block_tables: torch.Tensor
    rows: KeyRows
    chosen: torch.Tensor
    scale: float
    latent: int
