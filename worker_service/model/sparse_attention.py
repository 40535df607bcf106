"""Attention over chosen latents in pages, for one launch: an indexer's keys lie beside the latents (ADR 28).

A query's choice and its attention are functions of its sequence's keys alone, so decode rows and prompts, and every
invariance, go the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.backend import Backend
from kernels.index_logits import index_logits
from kernels.key_rows import KeyRows, key_rows
from kernels.mla import mla_sparse
from kernels.rotate_append_index import IndexQueries, rotate_append_index
from kernels.rotate_append_latent import rotate_append_latent
from kernels.top_k import top_k
from worker_service.gpu.page_pools import LayerPages, PagePools
from worker_service.model.attention_specs import IndexSpec, LatentSpec
from worker_service.model.choice_parts import CHOICE_BYTES, MOST_ROWS, choice_parts, index_query_bytes
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import IndexRows, Latents
from worker_service.model.spec import ModelSpec


class SparsePlans:
    """The layers of a model that attend to chosen latents. Nothing is planned ahead: each query's work is bounded."""

    def __init__(self, spec: ModelSpec, backend: Backend) -> None:
        self.mixers = sparse_mixers(spec)
        self.backend = backend
        self.top_k = max((mixer.indexer.top_k for mixer in self.mixers.values()), default=0)


class SparseMixer(NamedTuple):
    spec: LatentSpec
    indexer: IndexSpec


def sparse_mixers(spec: ModelSpec) -> dict[int, SparseMixer]:
    """Returns the layers with chosen latents, by number."""
    return {
        number: SparseMixer(layer.mixer, layer.mixer.index)
        for number, layer in enumerate(spec.layers)
        if isinstance(layer.mixer, LatentSpec) and layer.mixer.index is not None
    }


def sparse_workspace_bytes(
    spec: ModelSpec, max_tokens: int, dtype: torch.dtype, index_dtype: torch.dtype | None = None
) -> int:
    """Returns the memory that index queries, choices and absorbed queries of launches need beside the pools; 0 for
    other models.

    Args:
        dtype: the model's.
        index_dtype: of index keys in pages, as in page_layouts; None is `dtype`.
    """
    rows = min(max_tokens, MOST_ROWS)

    def mixer_bytes(mixer: LatentSpec, index: IndexSpec) -> int:
        absorbed = rows * mixer.num_heads * (mixer.width + mixer.latent_dim) * dtype.itemsize
        choice = max_tokens * index.top_k * torch.int32.itemsize
        return CHOICE_BYTES + max_tokens * index_query_bytes(index, dtype, index_dtype) + choice + absorbed

    return max((mixer_bytes(*mixer) for mixer in sparse_mixers(spec).values()), default=0)


class PagedSparse:
    """Sparse attention for one launch: new latents and index keys go to their pages first, so pages alone are read."""

    def __init__(self, pools: PagePools, launch: LaunchInputs, plans: SparsePlans) -> None:
        self._pools = pools
        self._launch = launch
        self._mixers = plans.mixers
        self._backend = plans.backend
        num_tokens = launch.token_ids.shape[0]
        self._rows = key_rows(
            launch.decode_seqlens_k[: launch.num_decode], launch.prefill_cu_q, launch.prefill_cu_k, num_tokens
        )
        self._chosen = launch.token_ids.new_empty((num_tokens, plans.top_k), dtype=torch.int32)

    def __call__(self, layer: int, latents: Latents, index: IndexRows | None) -> torch.Tensor:
        """Returns [num_tokens, heads, value_dim], zeros for padding rows, which are not written."""
        launch, mixer = self._launch, self._mixers[layer].spec
        pages = self._pools.layer_pages(layer)
        rotate_append_latent(
            latents.q,
            latents.kv,
            latents.positions,
            latents.cos_sin,
            pages.planes[0],
            launch.slot_mapping[pages.group],
            norm=latents.norm,
            eps=mixer.inner_eps,
            backend=self._backend,
        )
        queries = None if index is None else self._append(layer, latents, index)
        q = latents.q
        out = q.new_empty((q.shape[0], mixer.num_heads, mixer.value_dim))
        for rows, width in choice_parts(launch):
            part = self._rows.part(rows)
            if queries is not None:
                self._choose(layer, queries, rows, part, width)
            mla_sparse(
                q[rows],
                pages.planes[0],
                latents.kv_up,
                launch.block_tables[pages.group],
                part,
                self._chosen[rows],
                scale=mixer.scale,
                out=out[rows],
                backend=self._backend,
            )
        return out

    def _append(self, layer: int, latents: Latents, index: IndexRows) -> IndexQueries:
        """Puts index keys into their pages; returns the queries to choose by."""
        assert latents.cos_sin is not None
        pages = self._pools.layer_pages(layer)
        return rotate_append_index(
            index.q,
            index.head_weights,
            index.k,
            latents.positions,
            latents.cos_sin,
            pages.planes[1],
            self._launch.slot_mapping[pages.group],
            norm=index.norm,
            bias=index.bias,
            eps=self._mixers[layer].indexer.norm_eps,
            scales=_scales(pages),
            backend=self._backend,
        )

    def _choose(self, layer: int, queries: IndexQueries, rows: slice, part: KeyRows, width: int) -> None:
        """Fills the choices of these rows."""
        pages = self._pools.layer_pages(layer)
        logits = index_logits(
            queries.q[rows],
            queries.weights[rows],
            pages.planes[1],
            self._launch.block_tables[pages.group],
            part,
            width,
            scales=_scales(pages),
            least_keys=self._mixers[layer].indexer.top_k,
            backend=self._backend,
        )
        top_k(logits, part.num_keys, self._chosen.shape[1], out=self._chosen[rows], backend=self._backend)


def _scales(pages: LayerPages) -> torch.Tensor | None:
    """Of the index keys, where these are fp8."""
    return pages.planes[2] if len(pages.planes) > 2 else None
