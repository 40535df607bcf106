"""How DeepSeek V4's layers are taken from a checkpoint, by the names that it is published with."""

from __future__ import annotations

import torch

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import CompressedSpec, CompressorSpec
from worker_service.model.layer_weights import (
    CompressedWeights,
    CompressorWeights,
    DenseWeights,
    LayerWeights,
    Linear,
    MoeWeights,
    StreamWeights,
)
from worker_service.model.spec import LayerSpec, ModelSpec, MoeSpec
from worker_service.model.take_weights import stacked, take_experts
from worker_service.model.tensors import TensorSource

# Of a branch's streams: to the branch, from it, and from each stream to each.
KINDS_OF_MIX = 3


def take_compressed_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    assert isinstance(layer.mixer, CompressedSpec) and isinstance(layer.mlp, MoeSpec) and spec.streams is not None
    hidden, n = spec.hidden_size, spec.streams.num_streams
    mixer_streams, mlp_streams = (
        _take_streams(source, f"{prefix}.hc_{branch}_", (2 + n) * n, KINDS_OF_MIX, n * hidden)
        for branch in ("attn", "ffn")
    )
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.attn_norm.weight", hidden),
        mixer=_take_mixer(source, f"{prefix}.attn", layer.mixer, hidden),
        mlp_norm=source.take(f"{prefix}.ffn_norm.weight", hidden),
        mlp=_take_experts(source, f"{prefix}.ffn", layer.mlp, spec),
        streams=(mixer_streams, mlp_streams),
    )


def take_streams_head(source: TensorSource, prefix: str, spec: ModelSpec) -> StreamWeights:
    """Takes what makes one row of the streams behind the last layer."""
    assert spec.streams is not None
    n = spec.streams.num_streams
    return _take_streams(source, f"{prefix}.hc_", n, 1, n * spec.hidden_size)


def _take_streams(source: TensorSource, prefix: str, mixes: int, scales: int, width: int) -> StreamWeights:
    return StreamWeights(
        source.take(f"{prefix}fn", mixes, width, wide=True),
        source.take(f"{prefix}base", mixes, wide=True),
        source.take(f"{prefix}scale", scales, wide=True),
    )


def _take_mixer(source: TensorSource, prefix: str, spec: CompressedSpec, hidden: int) -> CompressedWeights:
    dim, made = spec.head_dim, spec.compressor
    index = None if made is None else made.index
    q_up = [source.take(f"{prefix}.wq_b.weight", spec.num_heads * dim, spec.q_rank)]
    down = [source.take(f"{prefix}.wq_a.weight", spec.q_rank, hidden), source.take(f"{prefix}.wkv.weight", dim, hidden)]
    compressors = []
    if made is not None:
        compressors.append(_take_compressor(source, f"{prefix}.compressor", made, dim, hidden, down))
    if made is not None and index is not None:
        names = f"{prefix}.indexer"
        compressors.append(_take_compressor(source, f"{names}.compressor", made, index.head_dim, hidden, down))
        down.append(source.take(f"{names}.weights_proj.weight", index.num_heads, hidden))
        q_up.append(source.take(f"{names}.wq_b.weight", index.num_heads * index.head_dim, spec.q_rank))
    # transformers saves the one under the other's name.
    kv_norm = "norm" if source.holds(f"{prefix}.norm.weight") else "kv_norm"
    groups, of_group = spec.output_groups, spec.num_heads * dim // spec.output_groups
    inner = source.take(f"{prefix}.wo_a.weight", groups * spec.output_rank, of_group)
    return CompressedWeights(
        down=Linear(stacked(down), None),
        q_norm=source.take(f"{prefix}.q_norm.weight", spec.q_rank),
        q_up=Linear(stacked(q_up), None),
        kv_norm=source.take(f"{prefix}.{kv_norm}.weight", dim),
        sinks=source.take(f"{prefix}.attn_sink", spec.num_heads, wide=True),
        groups=tuple(Linear(weight, None) for weight in inner.chunk(groups)),
        output=Linear(source.take(f"{prefix}.wo_b.weight", hidden, groups * spec.output_rank), None),
        compressors=tuple(compressors),
    )


def _take_compressor(
    source: TensorSource, prefix: str, made: CompressorSpec, dim: int, hidden: int, down: list[torch.Tensor]
) -> CompressorWeights:
    """Adds the projections to values and gates to `down`."""
    half = made.parts // 2 * dim
    down += [source.take(f"{prefix}.{name}.weight", half, hidden) for name in ("wkv", "wgate")]
    return CompressorWeights(
        source.take(f"{prefix}.ape", made.ratio, half, wide=True), source.take(f"{prefix}.norm.weight", dim)
    )


def _take_experts(source: TensorSource, prefix: str, mlp: MoeSpec, spec: ModelSpec) -> MoeWeights:
    hidden, count, inner, expert = spec.hidden_size, mlp.num_experts, mlp.intermediate_size, f"{prefix}.experts"
    router = source.take(f"{prefix}.gate.weight", count, hidden)
    table, bias = None, None
    if mlp.by_token:
        name = f"{prefix}.gate.tid2eid"
        ids = source.take(name, spec.vocab_size, mlp.rule.top_k, wide=True)
        # A kernel takes the numbers as they are. Where only names are listed there is nothing to look at.
        if not ids.is_meta and not ((ids >= 0) & (ids < count)).all():
            raise ModelError(name, f"has an expert that is none of 0 to {count - 1}")
        table = ids.to(torch.int32)
    else:
        bias = source.take(f"{prefix}.gate.bias", count, wide=True)
    names = tuple(f"{expert}.{{expert}}.{name}.weight" for name in ("w1", "w3"))
    return MoeWeights(
        Linear(router, None),
        take_experts(source, names, count, inner, hidden),
        take_experts(source, (f"{expert}.{{expert}}.w2.weight",), count, hidden, inner),
        selection_bias=bias,
        shared=_take_shared(source, f"{prefix}.shared_experts", inner, hidden),
        experts_of_token=table,
    )


def _take_shared(source: TensorSource, prefix: str, inner: int, hidden: int) -> DenseWeights:
    gate_up = stacked([source.take(f"{prefix}.{name}.weight", inner, hidden) for name in ("w1", "w3")])
    return DenseWeights(Linear(gate_up, None), Linear(source.take(f"{prefix}.w2.weight", hidden, inner), None))
