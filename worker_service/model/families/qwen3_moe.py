"""Qwen3-MoE: Qwen3's attention, and experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from kernels.route_experts import RoutingRule
from worker_service.core.errors import ModelError
from worker_service.model.families import llama
from worker_service.model.families.common import model_spec, read_activation, read_heads, read_positions
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.fields import Fields, first_of, flag, number, whole
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from worker_service.model.take_weights import take_layer

QWEN3_MOE = "Qwen3MoeForCausalLM"
DEFAULTS: Fields = {"num_key_value_heads": 4}


def read_spec(given: Fields) -> ModelSpec:
    # Not Qwen3's 128 where it is missing.
    fields = {**given, "head_dim": read_heads(given).head_dim}
    slides = flag(fields, "use_sliding_window") and fields.get("sliding_window") is not None
    # All layers, whatever max_window_layers says.
    window = whole(fields, "sliding_window") if slides else 0
    mixer = replace(llama.read_attention(llama.QWEN3, fields), window_tokens=window)
    dense, experts = read_dense(fields), read_experts(fields)
    return model_spec(
        fields,
        layers=tuple(LayerSpec(mixer, experts if has_experts else dense) for has_experts in expert_layers(fields)),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-6)),
        max_model_len=read_positions(fields).max_model_len,
    )


def read_dense(fields: Fields) -> DenseSpec:
    return DenseSpec(whole(fields, "intermediate_size"), read_activation(fields, "hidden_act", (Activation.SILU,)))


def read_experts(fields: Fields) -> MoeSpec:
    return MoeSpec(
        num_experts=whole(fields, first_of(fields, "num_experts", "num_local_experts"), 128),
        intermediate_size=whole(fields, "moe_intermediate_size"),
        rule=RoutingRule(
            top_k=whole(fields, "num_experts_per_tok", 8), renormalise=flag(fields, "norm_topk_prob", False)
        ),
        activation=read_activation(fields, "hidden_act", (Activation.SILU,)),
    )


def expert_layers(fields: Fields) -> list[bool]:
    """Returns which layers have experts: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name."""
    step = whole(fields, "decoder_sparse_step", 1)
    only = fields.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(isinstance(layer, int) for layer in only):
        raise ModelError("mlp_only_layers", f"must be numbers of layers, not {only!r}")
    return [layer not in only and (layer + 1) % step == 0 for layer in range(whole(fields, "num_hidden_layers"))]


FAMILY = Family((QWEN3_MOE,), read_spec, take_layer, DEFAULTS, kinds=FULL_AND_WINDOW)
