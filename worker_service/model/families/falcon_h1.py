"""Falcon-H1: attention and Mamba2 side by side in every layer, and a factor at nearly every projection."""

from __future__ import annotations

from dataclasses import replace

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import (
    model_spec,
    read_activation,
    read_heads,
    read_positions,
    require_whole_rope,
    usual_attention,
)
from worker_service.model.families.family import recurrent_family
from worker_service.model.families.mamba2 import read_mamba2, take_layer
from worker_service.model.fields import Fields, flag, number, whole
from worker_service.model.recurrent_specs import Mamba2Spec
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, NormSpec, ParallelSpec

FALCON_H1 = "FalconH1ForCausalLM"
DEFAULTS: Fields = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "eos_token_id": 2,
}


def read_spec(fields: Fields) -> ModelSpec:
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    mlp = DenseSpec(
        whole(fields, "intermediate_size"),
        read_activation(fields, "hidden_act", (Activation.SILU,)),
        bias=flag(fields, "mlp_bias"),
        gate_scale=gate,
    )
    return model_spec(
        fields,
        layers=(LayerSpec(_read_mixer(fields), mlp, mlp_scale=down),) * whole(fields, "num_hidden_layers"),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-5)),
        max_model_len=read_positions(fields).max_model_len,
        embedding_scale=number(fields, "embedding_multiplier", 1.0),
        logits_scale=number(fields, "lm_head_multiplier", 1.0),
    )


def _read_mixer(fields: Fields) -> ParallelSpec:
    attention, attention_in = _read_attention(fields)
    return ParallelSpec(
        attention,
        _read_recurrence(fields),
        attention_scale=attention_in * number(fields, "attention_out_multiplier", 1.0),
        recurrence_scale=number(fields, "ssm_out_multiplier", 1.0),
    )


def _read_attention(fields: Fields) -> tuple[AttentionSpec, float]:
    """Returns the attention over an input that is not scaled, and the factor of its output that makes up for it."""
    require_whole_rope(fields)
    head_dim = read_heads(fields).head_dim
    scaled = _input_scale(fields, "attention_in_multiplier", "attention_bias")
    # Scores have the factor twice, from queries and from keys; those have one more.
    scale = scaled**2 * number(fields, "key_multiplier", 1.0) * head_dim**-0.5
    return usual_attention(fields, read_positions(fields).rope, scale=scale), scaled


def _read_recurrence(fields: Fields) -> Mamba2Spec:
    inner_size = None if fields.get("mamba_d_ssm") is None else whole(fields, "mamba_d_ssm")
    spec = read_mamba2(fields, inner_size)
    scaled = _input_scale(fields, "ssm_in_multiplier", "mamba_proj_bias")
    gate, x, b, c, step = (scaled * factor for factor in _multipliers(fields, "ssm_multipliers", 5))
    is_normed, norm_first = flag(fields, "mamba_rms_norm"), flag(fields, "mamba_norm_before_gate", True)
    return replace(
        spec,
        output_bias=flag(fields, "projectors_bias"),
        norm=is_normed,
        norm_groups=spec.num_groups if is_normed else 1,
        norm_first=is_normed and norm_first,
        scales=(gate, x, b, c, step),
    )


def _input_scale(fields: Fields, name: str, bias: str) -> float:
    """Returns an input's factor, which is applied behind the projection: a bias would not have it."""
    scale = number(fields, name, 1.0)
    if scale != 1.0 and flag(fields, bias):
        raise ModelError(name, f"{scale} is not supported beside {bias}; 1.0 is")
    return scale


def _multipliers(fields: Fields, name: str, count: int) -> list[float]:
    values = fields.get(name)
    if values is None:
        return [1.0] * count
    is_list = isinstance(values, list | tuple) and len(values) == count
    if not is_list or any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise ModelError(name, f"must be {count} numbers, not {values!r}")
    return [float(value) for value in values]


FAMILY = recurrent_family(FALCON_H1, read_spec, take_layer, DEFAULTS, final_norm="final_layernorm")
