"""The mixer of sparse attention over latents: an indexer beside the attention's own projections."""

from __future__ import annotations

import torch

from kernels.backend import Backend
from kernels.rms_norm import rms_norm
from worker_service.model.attention_specs import IndexSpec, LatentSpec
from worker_service.model.layer_weights import LatentWeights, Linear
from worker_service.model.mixers import IndexRows, Latents, Step, packed
from worker_service.model.rope import RotaryTables


class SparseLatentMixer:
    """Attention over the latents that an indexer chooses, by this layer's or by the last one that has one."""

    def __init__(
        self,
        number: int,
        spec: LatentSpec,
        index: IndexSpec,
        weights: LatentWeights,
        rotary: RotaryTables,
        backend: Backend,
    ) -> None:
        assert weights.q_norm is not None and weights.q_up is not None
        self._number = number
        self._spec = spec
        self._down = packed(weights.down, backend)
        self._q_norm, self._q_up = weights.q_norm, packed(weights.q_up, backend)
        self._kv_norm, self._kv_up = weights.kv_norm, weights.kv_up
        self._output = packed(weights.output, backend)
        self._cos_sin = rotary.of(spec.rope, spec.rope_dim)
        self._indexer = None if weights.index is None else Indexer(index, weights, backend)
        self._backend = backend

    def linears(self) -> list[Linear]:
        """Without what makes keys and values: queries are absorbed, so it multiplies no rows of a batch."""
        index = [] if self._indexer is None else [self._indexer.head_weights]
        return [self._down, self._q_up, self._output, *index]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec = self._spec
        made = step.gemm(x, self._down)
        q_row, kv = made[:, : spec.q_rank], made[:, spec.q_rank : spec.q_rank + spec.width]
        up = step.gemm(rms_norm(q_row, self._q_norm, spec.inner_eps, backend=self._backend), self._q_up)
        num_queries = spec.num_heads * spec.query_dim
        latents = Latents(
            up[:, :num_queries].view(x.shape[0], spec.num_heads, spec.query_dim),
            kv,
            step.positions,
            self._cos_sin,
            self._kv_norm,
            self._kv_up,
        )
        index = None
        if self._indexer is not None:
            index = self._indexer(x, up[:, num_queries:], made[:, spec.q_rank + spec.width :], step)
        attended = step.attention.over_chosen(self._number, latents, index)
        return step.gemm(attended.view(x.shape[0], -1), self._output)


class Indexer:
    """What chooses a query's tokens: heads of its own over one key a token, weighted by the hidden state."""

    def __init__(self, spec: IndexSpec, weights: LatentWeights, backend: Backend) -> None:
        assert weights.index is not None
        self._spec = spec
        self._k_norm, self._k_norm_bias = weights.index.k_norm, weights.index.k_norm_bias
        # Scores go through max(s, 0), which a positive factor passes: theirs is a part of the heads' weights.
        factor = (spec.head_dim * spec.num_heads) ** -0.5
        self.head_weights = packed(Linear(weights.index.head_weights.weight * factor, None), backend)

    def __call__(self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, step: Step) -> IndexRows:
        return IndexRows(
            q.view(x.shape[0], self._spec.num_heads, self._spec.head_dim),
            k,
            self._k_norm,
            self._k_norm_bias,
            step.gemm(x.float(), self.head_weights),
        )
