"""The mixers with attention, and what a launch gives to all mixers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kernels.backend import Backend
from kernels.block_scan import Mamba2Steps
from kernels.gates import times_sigmoid
from kernels.linear import packed_weight
from kernels.rms_norm import rms_norm
from worker_service.model.attention_specs import AttentionSpec, LatentSpec
from worker_service.model.kv_scales import KvScales, kv_scales
from worker_service.model.layer_weights import AttentionWeights, LatentWeights, Linear
from worker_service.model.norms import stored_norm
from worker_service.model.rope import RotaryTables
from worker_service.model.spec import NormSpec


class Heads(NamedTuple):
    """A layer's heads as its GEMM made them, [num_tokens, q_heads + 2 kv_heads, head_dim], how to rotate them,
    and the scales of fp8 pages."""

    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    sinks: torch.Tensor | None
    scales: KvScales


class Latents(NamedTuple):
    """A layer's queries [num_tokens, heads, nope + rope] and tokens' rows [num_tokens, latent + rope] as its GEMMs made
    them, how to norm and turn them (None: not at all), and what makes keys and values of them."""

    q: torch.Tensor
    kv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor | None
    norm: torch.Tensor
    kv_up: torch.Tensor


class IndexRows(NamedTuple):
    """An indexer's queries [num_tokens, heads, dim] and keys [num_tokens, dim] as its GEMMs made them, the norm of the
    keys, and what each head's scores are multiplied by, fp32 [num_tokens, heads]."""

    q: torch.Tensor
    k: torch.Tensor
    norm: torch.Tensor
    bias: torch.Tensor
    head_weights: torch.Tensor


class RawRows(NamedTuple):
    """What a compressor makes entries of, [num_tokens, values and gates] as a GEMM made it, the bias of the gates, fp32
    [ratio, gates], and the norm of an entry."""

    made: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor


class EntryIndex(NamedTuple):
    """An indexer's queries over entries [num_tokens, heads, dim], as the GEMM made them, and what each head's scores
    are multiplied by, fp32 [num_tokens, heads]."""

    q: torch.Tensor
    head_weights: torch.Tensor


class CompressedRows(NamedTuple):
    """A layer's queries [num_tokens, heads, dim], normed, and keys [num_tokens, dim] as the GEMM made them, how to norm
    and turn them; `raw` of entries and of index keys, and the indexer's rows, where the layer has these."""

    q: torch.Tensor
    kv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    kv_norm: torch.Tensor
    sinks: torch.Tensor
    raw: tuple[RawRows, ...] = ()
    entry_index: EntryIndex | None = None


class Attention(Protocol):
    """Puts what is new into a layer's pages, and returns the attention output: [num_tokens, heads, value_dim]."""

    def over_heads(self, layer: int, heads: Heads) -> torch.Tensor: ...

    def over_latents(self, layer: int, latents: Latents) -> torch.Tensor: ...

    def over_chosen(self, layer: int, latents: Latents, index: IndexRows | None) -> torch.Tensor:
        """Over the latents that an indexer chooses; None: over those that the last layer with one has chosen."""
        ...

    def over_compressed(self, layer: int, rows: CompressedRows) -> torch.Tensor:
        """Over a window of tokens and compressed entries."""
        ...


class Taps(NamedTuple):
    """A causal convolution of each channel: weight [channels, width], oldest first, and bias [channels]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    has_silu: bool = False


class Mamba2Rows(NamedTuple):
    """What goes into Mamba2's recurrence: x and gate [num_tokens, heads, dim], b and c [num_tokens, groups, d_state],
    of `steps` the raw sizes [num_tokens, heads]; skip fp32 [heads]. No gate: the output is as it is."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    steps: Mamba2Steps
    skip: torch.Tensor
    gate: torch.Tensor | None

    def part(self, tokens: slice) -> Mamba2Rows:
        steps = self.steps._replace(raw=self.steps.raw[tokens])
        gate = None if self.gate is None else self.gate[tokens]
        return Mamba2Rows(self.x[tokens], self.b[tokens], self.c[tokens], steps, self.skip, gate)


class GatedDeltaRows(NamedTuple):
    """What goes into the gated delta rule: q and k [num_tokens, k_heads, dk], v [num_tokens, heads, dv], log decays g
    and beta fp32 [num_tokens, heads], g of Kimi's rule [num_tokens, heads, dk]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, tokens: slice) -> GatedDeltaRows:
        return GatedDeltaRows(*(rows[tokens] for rows in self))


class States(Protocol):
    """Carries the states of a launch's rows through its layers."""

    def convolve(self, layer: int, x: torch.Tensor, taps: Taps) -> torch.Tensor:
        """Returns [num_tokens, channels]; each row goes on behind the columns that its sequence had last."""
        ...

    def mamba2(self, layer: int, rows: Mamba2Rows) -> torch.Tensor:
        """Returns [num_tokens, heads, dim]; each row goes on from the state that its sequence had last."""
        ...

    def gated_delta(self, layer: int, rows: GatedDeltaRows) -> torch.Tensor:
        """Returns [num_tokens, heads, dv]; each row goes on from the state that its sequence had last."""
        ...


class Gemm(Protocol):
    """x [num_rows, K] through a projection: [num_rows, N]."""

    def __call__(self, x: torch.Tensor, linear: Linear, /) -> torch.Tensor: ...


class Step(NamedTuple):
    """What one launch gives to every layer."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Attention
    states: States
    gemm: Gemm


def packed(linear: Linear, backend: Backend) -> Linear:
    return Linear(packed_weight(linear.weight, backend), linear.bias)


class AttentionMixer:
    """Attention over keys and values in pages."""

    def __init__(
        self,
        number: int,
        spec: AttentionSpec,
        weights: AttentionWeights,
        norm: NormSpec,
        input_norm: torch.Tensor,
        rotary: RotaryTables,
        backend: Backend,
    ) -> None:
        self._number = number
        self._shape = (spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        self._has_gate = spec.output_gate
        self._backend = backend
        self._cos_sin = rotary.of(spec.rope, spec.rotary_dim)
        self._scales = kv_scales(spec, weights, norm, input_norm, self._cos_sin)
        self._qkv = packed(weights.qkv, backend)
        self._output = packed(weights.output, backend)
        self._q_norm, self._k_norm = (
            None if weight is None else stored_norm(norm, weight) for weight in (weights.q_norm, weights.k_norm)
        )
        self._sinks = weights.sinks
        self._eps = norm.eps

    def linears(self) -> list[Linear]:
        return [self._qkv, self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        made = step.gemm(x, self._qkv)
        num_heads, dim = self._shape
        heads = Heads(
            made[:, : num_heads * dim].view(x.shape[0], num_heads, dim),
            step.positions,
            self._cos_sin,
            self._q_norm,
            self._k_norm,
            self._eps,
            self._sinks,
            self._scales,
        )
        attended = step.attention.over_heads(self._number, heads).view(x.shape[0], -1)
        if self._has_gate:
            attended = times_sigmoid(attended, made[:, num_heads * dim :], backend=self._backend)
        return step.gemm(attended, self._output)


class LatentMixer:
    """Attention over latents in pages."""

    def __init__(
        self, number: int, spec: LatentSpec, weights: LatentWeights, rotary: RotaryTables, backend: Backend
    ) -> None:
        self._number = number
        self._spec = spec
        self._down = packed(weights.down, backend)
        self._q_up = None if weights.q_up is None else packed(weights.q_up, backend)
        self._output = packed(weights.output, backend)
        self._q_norm, self._kv_norm, self._kv_up = weights.q_norm, weights.kv_norm, weights.kv_up
        self._cos_sin = None if spec.rope is None else rotary.of(spec.rope, spec.rope_dim)
        self._backend = backend

    def linears(self) -> list[Linear]:
        """The one that makes keys and values is multiplied beside attention, by the same route as the others."""
        up = [] if self._q_up is None else [self._q_up]
        return [self._down, *up, Linear(self._kv_up, None), self._output]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        spec = self._spec
        made = step.gemm(x, self._down)
        q, kv = made[:, : -spec.width], made[:, -spec.width :]
        if self._q_up is not None:
            assert self._q_norm is not None
            q = step.gemm(rms_norm(q, self._q_norm, spec.inner_eps, backend=self._backend), self._q_up)
        latents = Latents(
            q.view(q.shape[0], spec.num_heads, spec.query_dim),
            kv,
            step.positions,
            self._cos_sin,
            self._kv_norm,
            self._kv_up,
        )
        attended = step.attention.over_latents(self._number, latents)
        return step.gemm(attended.view(x.shape[0], -1), self._output)
