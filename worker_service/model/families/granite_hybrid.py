"""Granite 4: Mamba2 in most layers and attention in a few, experts beside a shared MLP or that MLP alone.

Both branches are scaled where they join the residual stream.
"""

from __future__ import annotations

from kernels.route_experts import RoutingRule
from worker_service.model.families.common import model_spec, read_activation, read_positions, usual_attention
from worker_service.model.families.family import recurrent_family
from worker_service.model.families.mamba2 import LAYER_TYPES, read_mamba2, take_hybrid_mixer
from worker_service.model.fields import Fields, first_of, layer_types, number, one_of, whole
from worker_service.model.layer_weights import DenseWeights, LayerWeights, Linear, MoeWeights
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import take_linear
from worker_service.model.tensors import TensorSource

GRANITE_HYBRID = "GraniteMoeHybridForCausalLM"
DEFAULTS: Fields = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
# Whether attention has rotary embeddings; a null says no.
POSITIONS = {"rope": True, "nope": False}


def read_spec(fields: Fields) -> ModelSpec:
    positions = read_positions(fields)
    rope = positions.rope if one_of(fields, "position_embedding_type", POSITIONS, "nope") else None
    attention = usual_attention(fields, rope, scale=number(fields, "attention_multiplier", 1.0))
    num_layers, name = whole(fields, "num_hidden_layers"), first_of(fields, "layer_types", "layers_block_type")
    attending = layer_types(fields, num_layers, LAYER_TYPES, name) or [False] * num_layers
    mamba, mlp = read_mamba2(fields), _read_mlp(fields)
    residual = number(fields, "residual_multiplier", 1.0)
    return model_spec(
        fields,
        layers=tuple(LayerSpec(attention if attends else mamba, mlp, residual, residual) for attends in attending),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-6)),
        max_model_len=positions.max_model_len,
        embedding_scale=number(fields, "embedding_multiplier", 1.0),
        logits_scale=1.0 / number(fields, "logits_scaling", 1.0),
    )


def _read_mlp(fields: Fields) -> DenseSpec | MoeSpec:
    """Returns the experts beside the shared MLP, or the latter alone where there are none."""
    activation = read_activation(fields, "hidden_act", (Activation.SILU,))
    shared = DenseSpec(whole(fields, "shared_intermediate_size", 1024), activation)
    num_experts = whole(fields, "num_local_experts", 8, least=0)
    if not num_experts:
        return shared
    return MoeSpec(
        num_experts=num_experts,
        intermediate_size=whole(fields, "intermediate_size"),
        rule=RoutingRule(top_k=whole(fields, "num_experts_per_tok", 2), renormalise=True),
        activation=activation,
        shared=shared,
    )


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mlp = spec.hidden_size, layer.mlp
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_hybrid_mixer(source, prefix, layer.mixer, hidden),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=(
            _take_moe(source, prefix, mlp, hidden)
            if isinstance(mlp, MoeSpec)
            else _take_shared(source, prefix, mlp, hidden)
        ),
    )


def _take_shared(source: TensorSource, prefix: str, spec: DenseSpec | None, hidden: int) -> DenseWeights:
    assert spec is not None
    inner = spec.intermediate_size
    return DenseWeights(
        take_linear(source, [f"{prefix}.shared_mlp.input_linear"], [2 * inner], hidden, bias=False),
        take_linear(source, [f"{prefix}.shared_mlp.output_linear"], [hidden], inner, bias=False),
    )


def _take_moe(source: TensorSource, prefix: str, spec: MoeSpec, hidden: int) -> MoeWeights:
    """Takes the experts; all of a layer lie in one tensor."""
    count, inner, moe = spec.num_experts, spec.intermediate_size, f"{prefix}.block_sparse_moe"
    return MoeWeights(
        Linear(source.take(f"{moe}.router.layer.weight", count, hidden), None),
        source.take(f"{moe}.input_linear.weight", count, 2 * inner, hidden),
        source.take(f"{moe}.output_linear.weight", count, hidden, inner),
        shared=_take_shared(source, prefix, spec.shared, hidden),
    )


FAMILY = recurrent_family(GRANITE_HYBRID, read_spec, take_layer, DEFAULTS)
