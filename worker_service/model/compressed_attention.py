"""Attention over a window of tokens and compressed entries, for one launch.

A layer's rows lie in up to three groups of pages: keys of tokens, entries (with index keys beside them), and the raw
rows that entries are made of. Raw rows stand for each token, so a launch changes nothing in place. How many entries a
row sees is one formula, `KeyRows.entries`, for logits, choice and attention.
"""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.compress_tokens import compress_tokens
from kernels.compressed_attention import compressed_attention
from kernels.index_logits import index_logits
from kernels.key_rows import key_rows
from kernels.rotate_append_tail import rotate_append_tail
from kernels.rotate_tail import rotate_tail
from kernels.top_k import top_k
from worker_service.gpu.page_pools import PagePools
from worker_service.model.attention_specs import CompressedSpec, CompressorSpec, IndexSpec
from worker_service.model.choice_parts import CHOICE_BYTES, choice_parts, index_query_bytes
from worker_service.model.launch_inputs import LaunchInputs
from worker_service.model.mixers import CompressedRows
from worker_service.model.spec import ModelSpec

# Partial results of compressed_attention, where few rows share out their keys.
PARTIAL_BYTES = 128 << 20


class CompressedPlans:
    """The layers of a model with a window and compressed entries, by number. Nothing is planned ahead."""

    def __init__(self, spec: ModelSpec, backend: Backend) -> None:
        self.mixers = compressed_mixers(spec)
        self.backend = backend


def compressed_mixers(spec: ModelSpec) -> dict[int, CompressedSpec]:
    """Returns the layers with a window and compressed entries, by number."""
    return {number: layer.mixer for number, layer in enumerate(spec.layers) if isinstance(layer.mixer, CompressedSpec)}


def compressed_workspace_bytes(spec: ModelSpec, max_tokens: int, dtype: torch.dtype) -> int:
    """Returns the memory that a launch's index queries, choices and partial results need beside the pools; 0 for other
    models. dtype is the model's."""
    made = [mixer.compressor for mixer in compressed_mixers(spec).values() if mixer.compressor is not None]
    if not made:
        return 0
    indexes = [compressor.index for compressor in made if compressor.index is not None]
    token_bytes = max((_choice_token_bytes(index, dtype) for index in indexes), default=0)
    return PARTIAL_BYTES + (CHOICE_BYTES + max_tokens * token_bytes if indexes else 0)


def _choice_token_bytes(index: IndexSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's index queries and chosen entries."""
    return index_query_bytes(index, dtype) + index.top_k * torch.int32.itemsize


class PagedCompressed:
    def __init__(self, pools: PagePools, launch: LaunchInputs, plans: CompressedPlans) -> None:
        self._pools = pools
        self._launch = launch
        self._mixers = plans.mixers
        self._backend = plans.backend
        self._rows = key_rows(
            launch.decode_seqlens_k[: launch.num_decode],
            launch.prefill_cu_q,
            launch.prefill_cu_k,
            launch.token_ids.shape[0],
        )

    def __call__(self, layer: int, rows: CompressedRows) -> torch.Tensor:
        """Returns [num_tokens, heads, head_dim]; what was turned with the keys is turned back. Queries are turned in
        place."""
        launch, spec, backend = self._launch, self._mixers[layer], self._backend
        pages = self._pools.layer_pages(layer)
        rotate_append_tail(
            rows.q,
            rows.kv,
            rows.positions,
            rows.cos_sin,
            pages.planes[0],
            launch.slot_mapping[pages.group],
            norm=rows.kv_norm,
            eps=spec.eps,
            backend=backend,
        )
        window = (rows.q, pages.planes[0], launch.block_tables[pages.group], self._rows, rows.sinks)
        scale, reach = spec.head_dim**-0.5, spec.window_tokens
        if spec.compressor is None:
            out = compressed_attention(*window, scale=scale, window_tokens=reach, backend=backend)
        else:
            self._compress(layer, spec.compressor, rows)
            entries = self._pools.layer_entries(layer)
            out = compressed_attention(
                *window,
                scale=scale,
                window_tokens=reach,
                entry_pages=entries.planes[0],
                entry_tables=launch.block_tables[entries.group],
                ratio=spec.compressor.ratio,
                chosen=self._chosen(layer, spec.compressor, rows),
                backend=backend,
            )
        rotate_tail(out, rows.positions, rows.cos_sin, inverse=True, backend=backend)
        return out

    def _compress(self, layer: int, compressor: CompressorSpec, rows: CompressedRows) -> None:
        """Makes the layer's entries, and the index keys beside them."""
        raw_pages, entries = self._pools.layer_raw(layer), self._pools.layer_entries(layer)
        launch = self._launch
        for raw, raw_plane, entry_plane in zip(rows.raw, raw_pages.planes, entries.planes, strict=True):
            compress_tokens(
                raw.made,
                raw_plane,
                launch.slot_mapping[raw_pages.group],
                launch.block_tables[raw_pages.group],
                self._rows,
                entry_plane,
                launch.block_tables[entries.group],
                ratio=compressor.ratio,
                overlap=compressor.overlaps,
                bias=raw.bias,
                norm=raw.norm,
                eps=self._mixers[layer].eps,
                cos_sin=rows.cos_sin,
                backend=self._backend,
            )

    def _chosen(self, layer: int, compressor: CompressorSpec, rows: CompressedRows) -> torch.Tensor | None:
        """Returns which entries each token attends to; None: all that it sees."""
        if compressor.index is None:
            return None
        assert rows.entry_index is not None
        entries = self._pools.layer_entries(layer)
        keys, launch, index, k = entries.planes[1], self._launch, rows.entry_index, compressor.index.top_k
        seen, tables = self._rows.entries(compressor.ratio), launch.block_tables[entries.group]
        rotate_tail(index.q, rows.positions, rows.cos_sin, backend=self._backend)
        chosen = torch.empty((index.q.shape[0], k), dtype=torch.int32, device=index.q.device)
        for part, width in choice_parts(launch, compressor.ratio):
            # No name holds the logits: their memory is free for those of the next part.
            top_k(
                index_logits(
                    index.q[part],
                    index.head_weights[part],
                    keys,
                    tables,
                    seen.part(part),
                    width,
                    least_keys=k,
                    backend=self._backend,
                ),
                seen.num_keys[part],
                k,
                out=chosen[part],
                backend=self._backend,
            )
        return chosen
