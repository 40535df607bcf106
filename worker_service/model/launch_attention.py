"""The attention of one launch, which all its layers share: over heads, over latents, over chosen latents, over a
window and compressed entries."""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker_service.gpu.page_pools import PagePools
from worker_service.model.attention import AttentionPlans, PagedHeads
from worker_service.model.compressed_attention import CompressedPlans, PagedCompressed
from worker_service.model.gemm_dispatch import GemmDispatch
from worker_service.model.latent_attention import LatentPlans, PagedLatents
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import CompressedRows, Heads, IndexRows, Latents
from worker_service.model.sparse_attention import PagedSparse, SparsePlans


class Plans(NamedTuple):
    heads: AttentionPlans
    latents: LatentPlans
    sparse: SparsePlans
    compressed: CompressedPlans


class LaunchAttention:
    """The model's `Attention` for one launch."""

    def __init__(self, pools: PagePools, launch: LaunchInputs, plans: Plans, gemm: GemmDispatch) -> None:
        self._heads = PagedHeads(pools, launch, plans.heads) if plans.heads.mixers else None
        self._latents = PagedLatents(pools, launch, plans.latents, gemm) if plans.latents.mixers else None
        self._sparse = PagedSparse(pools, launch, plans.sparse) if plans.sparse.mixers else None
        self._compressed = PagedCompressed(pools, launch, plans.compressed) if plans.compressed.mixers else None

    def over_heads(self, layer: int, heads: Heads) -> torch.Tensor:
        assert self._heads is not None
        return self._heads(layer, heads)

    def over_latents(self, layer: int, latents: Latents) -> torch.Tensor:
        assert self._latents is not None
        return self._latents(layer, latents)

    def over_chosen(self, layer: int, latents: Latents, index: IndexRows | None) -> torch.Tensor:
        assert self._sparse is not None
        return self._sparse(layer, latents, index)

    def over_compressed(self, layer: int, rows: CompressedRows) -> torch.Tensor:
        assert self._compressed is not None
        return self._compressed(layer, rows)
