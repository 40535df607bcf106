"""The mixer of attention over a window and compressed entries."""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.rms_norm import rms_norm
from worker_service.model.attention_specs import CompressedSpec
from worker_service.model.layer_weights import CompressedWeights, Linear
from worker_service.model.mixers import CompressedRows, EntryIndex, RawRows, Step, packed
from worker_service.model.rope import RotaryTables


class CompressedMixer:
    def __init__(
        self, number: int, spec: CompressedSpec, weights: CompressedWeights, rotary: RotaryTables, backend: Backend
    ) -> None:
        self._number = number
        self._spec = spec
        self._weights = weights
        self._down, self._q_up = packed(weights.down, backend), packed(weights.q_up, backend)
        self._groups = [packed(linear, backend) for linear in weights.groups]
        self._output = packed(weights.output, backend)
        self._cos_sin = rotary.of(spec.rope, spec.rope_dim)
        self._head_ones = torch.ones_like(weights.kv_norm)
        index = None if spec.compressor is None else spec.compressor.index
        # Scores go through max(s, 0), which a positive factor passes: theirs is a part of the heads' weights.
        self._index_factor = 1.0 if index is None else (index.head_dim * index.num_heads) ** -0.5
        self._parts = down_parts(spec)
        self._backend = backend

    def linears(self) -> list[Linear]:
        return [self._down, self._q_up, *self._groups, self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec, weights, num_tokens = self._spec, self._weights, x.shape[0]
        made = torch.split(step.gemm(x, self._down), self._parts, dim=1)
        q_row, kv = made[:2]
        up = step.gemm(rms_norm(q_row, weights.q_norm, spec.eps, backend=self._backend), self._q_up)
        num_queries = spec.num_heads * spec.head_dim
        q = up[:, :num_queries].reshape(num_tokens * spec.num_heads, spec.head_dim)
        q = rms_norm(q, self._head_ones, spec.eps, backend=self._backend)
        rows = CompressedRows(
            q.view(num_tokens, spec.num_heads, spec.head_dim),
            kv,
            step.positions,
            self._cos_sin,
            weights.kv_norm,
            weights.sinks,
            tuple(RawRows(raw, *compressor) for raw, compressor in zip(made[2:], weights.compressors, strict=False)),
            self._entry_index(up[:, num_queries:], made[-1]),
        )
        attended = step.attention.over_compressed(self._number, rows).reshape(num_tokens, spec.output_groups, -1)
        of_groups = [step.gemm(attended[:, at].contiguous(), linear) for at, linear in enumerate(self._groups)]
        return step.gemm(torch.cat(of_groups, dim=1), self._output)

    def _entry_index(self, q: torch.Tensor, head_weights: torch.Tensor) -> EntryIndex | None:
        compressor = self._spec.compressor
        if compressor is None or compressor.index is None:
            return None
        index = compressor.index
        return EntryIndex(
            q.view(q.shape[0], index.num_heads, index.head_dim), head_weights.float() * self._index_factor
        )


def down_parts(spec: CompressedSpec) -> list[int]:
    """Returns the rows of the first projection: a query's row, a key, raw rows of entries and of index keys, and the
    weights of the index heads."""
    parts = [spec.q_rank, spec.head_dim]
    made = spec.compressor
    if made is not None:
        parts.append(made.parts * spec.head_dim)
        if made.index is not None:
            parts += [made.parts * made.index.head_dim, made.index.num_heads]
    return parts
