"""gpt-oss: a window in every other layer, a sink for each head, and experts with biases and a clamped swiglu."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.grouped_linear import Mxfp4Experts
from kernels.route_experts import RoutingRule
from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import model_spec, read_heads, read_positions, read_sliding
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.fields import Fields, first_of, flag, number, one_of, whole
from worker_service.model.layer_weights import ExpertWeight, LayerWeights, MoeWeights
from worker_service.model.mlps import SWIGLU_LIMIT
from worker_service.model.spec import Activation, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import take_linear, take_mixer
from worker_service.model.tensors import TensorSource
from worker_service.model.weight_formats import MXFP4, PLAIN

GPT_OSS = "GptOssForCausalLM"
ROPE: Fields = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


DEFAULTS: Fields = {"head_dim": 64, "num_key_value_heads": 8, "rope_theta": ROPE["rope_theta"]}


def read_spec(given: Fields) -> ModelSpec:
    has_rope = given.get("rope_parameters") or given.get("rope_scaling")
    fields = given if has_rope else {**given, "rope_parameters": ROPE}
    one_of(fields, "hidden_act", {"silu": None}, "silu")
    if number(fields, "swiglu_limit", SWIGLU_LIMIT) != SWIGLU_LIMIT:
        raise ModelError("swiglu_limit", f"{fields['swiglu_limit']!r} is not supported; {SWIGLU_LIMIT} is")
    num_layers = whole(fields, "num_hidden_layers")
    sliding = read_sliding(fields, num_layers) or [layer % 2 == 0 for layer in range(num_layers)]
    everything, mlp = _attention(fields), _experts(fields)
    window = replace(everything, window_tokens=whole(fields, "sliding_window", 128))
    return model_spec(
        fields,
        layers=tuple(LayerSpec(window if slides else everything, mlp) for slides in sliding),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-5)),
        max_model_len=read_positions(fields).max_model_len,
    )


def _attention(fields: Fields) -> AttentionSpec:
    heads = read_heads(fields)
    bias = flag(fields, "attention_bias", True)
    return AttentionSpec(
        *heads,
        rope=read_positions(fields).rope,
        rotary_dim=heads.head_dim,
        qkv_bias=bias,
        output_bias=bias,
        has_sinks=True,
    )


def _experts(fields: Fields) -> MoeSpec:
    return MoeSpec(
        num_experts=whole(fields, first_of(fields, "num_local_experts", "num_experts"), 128),
        intermediate_size=whole(fields, "intermediate_size"),
        rule=RoutingRule(top_k=whole(fields, "num_experts_per_tok", 4), renormalise=True),
        activation=Activation.CLAMPED_SWIGLU,
        bias=True,
    )


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mlp = spec.hidden_size, layer.mlp
    assert isinstance(mlp, MoeSpec)
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_mixer(source, f"{prefix}.self_attn", layer.mixer, hidden),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=_take_experts(source, f"{prefix}.mlp", mlp, hidden),
    )


def _take_experts(source: TensorSource, prefix: str, spec: MoeSpec, hidden: int) -> MoeWeights:
    """Takes the experts; all lie in one tensor, columns as outputs, gates and ups in turn."""
    count, inner, names = spec.num_experts, spec.intermediate_size, f"{prefix}.experts"
    return MoeWeights(
        router=take_linear(source, [f"{prefix}.router"], [count], hidden, bias=True),
        gate_up=_weight_in_halves(source.take_transposed_experts(f"{names}.gate_up_proj", count, 2 * inner, hidden)),
        down=source.take_transposed_experts(f"{names}.down_proj", count, hidden, inner),
        gate_up_bias=_in_halves(source.take(f"{names}.gate_up_proj_bias", count, 2 * inner)),
        down_bias=source.take(f"{names}.down_proj_bias", count, hidden),
    )


def _weight_in_halves(weight: ExpertWeight) -> ExpertWeight:
    if isinstance(weight, torch.Tensor):
        return _in_halves(weight)
    assert isinstance(weight, Mxfp4Experts), "blocks of 128 rows have gates and ups in turn"
    return Mxfp4Experts(_in_halves(weight.values), _in_halves(weight.scales))


def _in_halves(rows: torch.Tensor) -> torch.Tensor:
    """Returns [count, 2 n, ...] with the even rows before the odd ones."""
    if rows.is_meta:  # as in `stacked` of take_weights.py
        return torch.empty_like(rows)
    return torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1)


FAMILY = Family((GPT_OSS,), read_spec, take_layer, DEFAULTS, kinds=FULL_AND_WINDOW, weight_formats=(PLAIN, MXFP4))
