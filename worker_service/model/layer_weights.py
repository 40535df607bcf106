"""The weights of a layer as the decoder uses them: projections that read the same input are one matrix, so one GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.grouped_linear import StoredExperts

# Of all experts, [num_experts, N, K].
ExpertWeight = torch.Tensor | StoredExperts


class Linear(NamedTuple):
    """A projection: weight [N, K] and bias [N]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`sinks` fp32 [num_heads]; the norms are of each head, [head_dim]. Behind the values `qkv` has the rows of an
    output gate, as many as queries have."""

    qkv: Linear
    output: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """Of an indexer: the norm of its keys and that norm's bias, [head_dim], and what makes a factor for each head, in
    fp32. What makes its queries and keys is a part of the layer's `q_up` and `down`."""

    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    head_weights: Linear


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """`down` makes a query's row, or the queries themselves, and a token's row behind it; `q_up` makes queries of the
    former. kv_up [num_heads * (nope + value), latent] makes keys and values of the latter. With an indexer `down` makes
    its keys behind all that, and `q_up` its queries."""

    down: Linear
    kv_norm: torch.Tensor
    kv_up: torch.Tensor
    output: Linear
    q_norm: torch.Tensor | None = None
    q_up: Linear | None = None
    index: IndexWeights | None = None


class CompressorWeights(NamedTuple):
    """Of what makes entries: bias of the gates, fp32 [ratio, gates of a token], and the norm of an entry."""

    bias: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """`down` makes a query's row, a key, the compressors' raw rows and the weights of the index heads; `q_up` makes
    queries, the attention's, then the indexer's. `groups` are of the output's groups of heads. sinks fp32 [num_heads].
    `compressors`: of entries, then of index keys."""

    down: Linear
    q_norm: torch.Tensor
    q_up: Linear
    kv_norm: torch.Tensor
    sinks: torch.Tensor
    groups: tuple[Linear, ...]
    output: Linear
    compressors: tuple[CompressorWeights, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """How streams mix, all fp32: fn [mixes, num_streams * hidden], base [mixes], and a scale for each kind of mix."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """`inner` makes two gates and the values between them, in the order B, C, x. taps [channels, width], oldest
    first."""

    inner: Linear
    taps: torch.Tensor
    bias: torch.Tensor | None
    output: Linear


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """`inner` makes gates, the convolution's channels (x, b, c) and the raw steps, in this order. taps [channels,
    width], oldest first; the others are fp32 [num_heads], but for `norm` [inner_size]."""

    inner: Linear
    taps: torch.Tensor
    conv_bias: torch.Tensor | None
    a_log: torch.Tensor
    skip: torch.Tensor
    step_bias: torch.Tensor
    output: Linear
    norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ParallelWeights:
    attention: AttentionWeights
    recurrence: Mamba2Weights


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """`inner` makes queries, keys and values, which go through the convolution, then the output's gates, and of each
    head of values beta's logit and its decay's. taps [channels, width], oldest first; a_log and the bias of the decay's
    logits are fp32 [num_heads]; norm [value_dim] is of each head's output."""

    inner: Linear
    taps: torch.Tensor
    a_log: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    output: Linear


@dataclass(frozen=True, slots=True)
class KimiDeltaWeights:
    """`inner` makes queries, keys and values, which go through the convolution, then a row for decays, one for the
    output's gates, and of each head beta's logit; `decay_up` and `gate_up` [inner_size, rank] make logits of these
    rows. taps [channels, width], oldest first; a_log fp32 [num_heads] and the bias of the decays' logits fp32
    [inner_size]; norm [head_dim] is of each head's output."""

    inner: Linear
    taps: torch.Tensor
    decay_up: Linear
    a_log: torch.Tensor
    decay_bias: torch.Tensor
    gate_up: Linear
    norm: torch.Tensor
    output: Linear


MixerWeights = (
    AttentionWeights
    | LatentWeights
    | CompressedWeights
    | ShortConvWeights
    | Mamba2Weights
    | GatedDeltaWeights
    | KimiDeltaWeights
    | ParallelWeights
)


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Without a gate `gate_up` is the up projection alone."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """gate_up [num_experts, 2 intermediate, hidden] and down [num_experts, hidden, intermediate], with biases of
    [num_experts, rows], both in the model's dtype or as their checkpoint stores them; the selection bias is fp32
    [num_experts]. Experts without a gate have half of gate_up's rows. With `fused_shared` gate_up and down have one
    expert more behind these, the shared one, and `shared` is None.
    `latents` are the projections to the experts' input and from their output. Of the router's rows those behind the
    experts' are the shared expert's gate, where there is one, and zeros. `experts_of_token` int32 [vocab_size, top_k]
    stands for a choice."""

    router: Linear
    gate_up: ExpertWeight
    down: ExpertWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    selection_bias: torch.Tensor | None = None
    shared: DenseWeights | None = None
    fused_shared: bool = False
    latents: tuple[Linear, Linear] | None = None
    experts_of_token: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The norms behind a branch are there in a SANDWICH block only, the MLP's own one everywhere but in a PARALLEL and
    in a layer of one branch. `streams` are of the mixer and of the MLP."""

    mixer_norm: torch.Tensor
    mixer: MixerWeights | None
    mlp: DenseWeights | MoeWeights | None
    mlp_norm: torch.Tensor | None = None
    norm_behind_mixer: torch.Tensor | None = None
    norm_behind_mlp: torch.Tensor | None = None
    streams: tuple[StreamWeights, StreamWeights] | None = None
