"""How a layer's weights are taken from a checkpoint, by the names that most families use."""

from __future__ import annotations

import torch

from worker_service.model.layer_weights import AttentionWeights, DenseWeights, LayerWeights, Linear, MoeWeights
from worker_service.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoeSpec
from worker_service.model.tensors import TensorSource


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    """Takes a PRE_NORM layer."""
    hidden, mlp = spec.hidden_size, layer.mlp
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_attention(source, f"{prefix}.self_attn", layer.mixer, hidden),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=take_mlp(source, f"{prefix}.mlp", mlp, hidden),
    )


def take_mlp(source: TensorSource, prefix: str, spec: DenseSpec | MoeSpec, hidden: int) -> DenseWeights | MoeWeights:
    if isinstance(spec, MoeSpec):
        return take_moe(source, prefix, spec, hidden)
    return take_dense(source, prefix, spec, hidden)


def take_linear(source: TensorSource, names: list[str], rows: list[int], columns: int, *, bias: bool) -> Linear:
    """Returns the named projections as one, row under row."""
    weights = [source.take(f"{name}.weight", count, columns) for name, count in zip(names, rows, strict=True)]
    biases = [source.take(f"{name}.bias", count) for name, count in zip(names, rows, strict=True)] if bias else []
    return Linear(stacked(weights), stacked(biases) if biases else None)


def take_attention(source: TensorSource, prefix: str, spec: AttentionSpec, hidden: int) -> AttentionWeights:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = [f"{prefix}.{name}_proj" for name in "qkv"]
    qkv = take_linear(source, projections, [q_rows, kv_rows, kv_rows], hidden, bias=spec.qkv_bias)
    q_norm, k_norm = (
        source.take(f"{prefix}.{name}_norm.weight", spec.head_dim) if spec.qk_norm else None for name in "qk"
    )
    return AttentionWeights(
        _in_halves(qkv, spec) if spec.interleaved else qkv,
        take_linear(source, [f"{prefix}.o_proj"], [hidden], q_rows, bias=spec.output_bias),
        q_norm,
        k_norm,
        source.take(f"{prefix}.sinks", spec.num_heads, wide=True) if spec.has_sinks else None,
    )


def _in_halves(qkv: Linear, spec: AttentionSpec) -> Linear:
    """Returns the projection with the elements of each query and key in another order: even ones, then odd ones.

    What was turned as neighbours lies half a head apart then, as the kernels turn it, and scores do not see the order.
    """
    num_turned = spec.num_heads + spec.num_kv_heads
    heads = torch.arange((num_turned + spec.num_kv_heads) * spec.head_dim).view(-1, spec.head_dim)
    turned = heads[:num_turned, : spec.rotary_dim]
    heads[:num_turned, : spec.rotary_dim] = torch.cat([turned[:, ::2], turned[:, 1::2]], dim=1)
    order = heads.flatten().to(qkv.weight.device)
    return Linear(qkv.weight[order], None if qkv.bias is None else qkv.bias[order])


def take_experts(source: TensorSource, names: tuple[str, ...], count: int, rows: int, columns: int) -> torch.Tensor:
    """Returns [count, len(names) * rows, columns]: of each expert the named matrices, row under row.

    `{expert}` in a name stands for the expert's number.
    """
    return torch.stack(
        [stacked([source.take(name.format(expert=expert), rows, columns) for name in names]) for expert in range(count)]
    )


def take_dense(source: TensorSource, prefix: str, spec: DenseSpec, hidden: int) -> DenseWeights:
    inner, names = spec.intermediate_size, [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    gate_up = take_linear(source, names, [inner, inner], hidden, bias=spec.bias)
    return DenseWeights(gate_up, take_linear(source, [f"{prefix}.down_proj"], [hidden], inner, bias=spec.bias))


def take_moe(source: TensorSource, prefix: str, spec: MoeSpec, hidden: int) -> MoeWeights:
    """By the names of most families: a router `gate`, a gate, an up and a down projection for each expert."""
    count, inner, names = spec.num_experts, spec.intermediate_size, f"{prefix}.experts.{{expert}}"
    router = source.take(f"{prefix}.gate.weight", count, hidden, wide=spec.wide_router)
    bias = source.take(f"{prefix}.gate.e_score_correction_bias", count, wide=True) if spec.selection_bias else None
    return MoeWeights(
        Linear(router, None),
        take_experts(source, (f"{names}.gate_proj.weight", f"{names}.up_proj.weight"), count, inner, hidden),
        take_experts(source, (f"{names}.down_proj.weight",), count, hidden, inner),
        selection_bias=bias,
        shared=None if spec.shared is None else take_dense(source, f"{prefix}.shared_experts", spec.shared, hidden),
    )


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
