"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from kernels.route_experts import RoutingRule
from worker_service.model.families.common import model_spec, read_activation, read_positions
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.families.llama import MISTRAL, read_attention
from worker_service.model.fields import Fields, number, whole
from worker_service.model.layer_weights import LayerWeights, MoeWeights
from worker_service.model.spec import Activation, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import take_experts, take_linear, take_mixer
from worker_service.model.tensors import TensorSource

MIXTRAL = "MixtralForCausalLM"
DEFAULTS: Fields = {"num_key_value_heads": 8, "rope_theta": 1_000_000.0, "eos_token_id": 2}


def read_spec(fields: Fields) -> ModelSpec:
    window = 0 if fields.get("sliding_window") is None else whole(fields, "sliding_window")
    mixer = replace(read_attention(MISTRAL, fields), window_tokens=window)
    mlp = MoeSpec(
        num_experts=whole(fields, "num_local_experts", 8),
        intermediate_size=whole(fields, "intermediate_size"),
        rule=RoutingRule(top_k=whole(fields, "num_experts_per_tok", 2), renormalise=True),
        activation=read_activation(fields, "hidden_act", (Activation.SILU,)),
    )
    return model_spec(
        fields,
        layers=(LayerSpec(mixer, mlp),) * whole(fields, "num_hidden_layers"),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-5)),
        max_model_len=read_positions(fields).max_model_len,
    )


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mlp = spec.hidden_size, layer.mlp
    assert isinstance(mlp, MoeSpec)
    experts, inner, names = mlp.num_experts, mlp.intermediate_size, f"{prefix}.block_sparse_moe.experts.{{expert}}"
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_mixer(source, f"{prefix}.self_attn", layer.mixer, hidden),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=MoeWeights(
            take_linear(source, [f"{prefix}.block_sparse_moe.gate"], [experts], hidden, bias=False),
            take_experts(source, (f"{names}.w1.weight", f"{names}.w3.weight"), experts, inner, hidden),
            take_experts(source, (f"{names}.w2.weight",), experts, hidden, inner),
        ),
    )


FAMILY = Family((MIXTRAL,), read_spec, take_layer, DEFAULTS, kinds=FULL_AND_WINDOW)
