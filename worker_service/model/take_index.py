"""How the layers of sparse attention are taken from a checkpoint: DeepSeek's names, and those of the indexer."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker_service.model.attention_specs import IndexSpec, LatentSpec
from worker_service.model.layer_weights import IndexWeights, LatentWeights, LayerWeights, Linear
from worker_service.model.spec import LayerSpec, ModelSpec
from worker_service.model.take_weights import in_halves, joined, take_layer
from worker_service.model.tensors import TensorSource


def take_sparse_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    """Takes a PRE_NORM layer over latents, and its indexer where it has one."""
    taken = take_layer(source, prefix, spec, layer)
    assert isinstance(layer.mixer, LatentSpec) and layer.mixer.index is not None
    if layer.mixer.index.is_shared:
        return taken
    assert isinstance(taken.mixer, LatentWeights)
    indexer = f"{prefix}.self_attn.indexer"
    return replace(taken, mixer=_with_index(source, indexer, layer.mixer, layer.mixer.index, taken.mixer, spec))


def _with_index(
    source: TensorSource, prefix: str, mixer: LatentSpec, index: IndexSpec, weights: LatentWeights, spec: ModelSpec
) -> LatentWeights:
    """Returns the layer's weights with the indexer's projections behind those that read the same input."""
    dim, hidden = index.head_dim, spec.hidden_size
    q = Linear(source.take(f"{prefix}.wq_b.weight", index.num_heads * dim, mixer.q_rank), None)
    k = Linear(source.take(f"{prefix}.wk.weight", dim, hidden), None)
    norm, bias = source.take(f"{prefix}.k_norm.weight", dim), source.take(f"{prefix}.k_norm.bias", dim)
    # In fp32, as they decide among tokens.
    heads = Linear(source.take(f"{prefix}.weights_proj.weight", index.num_heads, hidden, wide=True), None)
    if index.interleaved:
        # Scores do not see the order, nor does the norm's mean: its weights move with the elements.
        q, k = (in_halves(linear, dim, 0, mixer.rope_dim) for linear in (q, k))
        norm, bias = (_moved(weight, mixer.rope_dim) for weight in (norm, bias))
    assert weights.q_up is not None
    return replace(
        weights,
        down=joined(weights.down, k),
        q_up=joined(weights.q_up, q),
        index=IndexWeights(norm, bias, heads),
    )


def _moved(weight: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Returns the vector in the order that `in_halves` gives a head."""
    return in_halves(Linear(weight.unsqueeze(1), None), weight.shape[0], 0, rotary_dim).weight.squeeze(1)
