"""MiMo-V2-Flash: layers with a window have sinks and twice the key-value heads, values are shorter than keys."""

from __future__ import annotations

from dataclasses import replace

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import SLIDING, model_spec, read_dense_layers, read_heads, read_sliding
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.families.glm4_moe import read_experts
from worker_service.model.families.qwen3_moe import read_dense
from worker_service.model.fields import Fields, flag, number, whole
from worker_service.model.layer_weights import LayerWeights
from worker_service.model.rope_fields import reach, read_ropes, rotary_dim
from worker_service.model.spec import LayerSpec, ModelSpec, NormSpec
from worker_service.model.take_weights import AttentionNames, take_attention, take_mlp
from worker_service.model.tensors import TensorSource

MIMO_V2_FLASH = "MiMoV2FlashForCausalLM"
ROPES: Fields = {
    "full_attention": {"rope_theta": 5_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}
ROTARY_SHARE = 0.334
DEFAULTS: Fields = {
    "head_dim": 192,
    "num_key_value_heads": 4,
    "attention_value_scale": 0.707,
    "n_shared_experts": 0,
}


def read_spec(given: Fields) -> ModelSpec:
    fields = given if given.get("rope_parameters") else {**given, "rope_parameters": ROPES}
    num_layers = whole(fields, "num_hidden_layers")
    sliding = read_sliding(fields, num_layers) or [bool(layer) and (layer + 1) % 6 != 0 for layer in range(num_layers)]
    mixers, max_model_len = _attention(fields)
    dense, experts = read_dense(fields), read_experts(fields)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(mixers[slides], dense if is_dense else experts)
            for slides, is_dense in zip(sliding, read_dense_layers(fields, num_layers), strict=True)
        ),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-5)),
        max_model_len=max_model_len,
    )


def _attention(fields: Fields) -> tuple[dict[bool, AttentionSpec], int]:
    """Returns the mixers of layers without and with a window, and the longest sequence."""
    heads, max_tokens = read_heads(fields), whole(fields, "max_position_embeddings")
    ropes = read_ropes(fields, tuple(SLIDING), max_tokens)
    if ropes is None:
        raise ModelError("rope_parameters", f"must have a rope for each of {', '.join(SLIDING)}")
    named = {kind: {"partial_rotary_factor": ROTARY_SHARE, **fields["rope_parameters"][kind]} for kind in SLIDING}
    everything = AttentionSpec(
        *heads,
        rope=ropes["full_attention"],
        rotary_dim=rotary_dim(named["full_attention"], heads.head_dim),
        value_dim=whole(fields, "v_head_dim", 128),
        value_scale=number(fields, "attention_value_scale", 1.0),
        qkv_bias=flag(fields, "attention_bias"),
    )
    window = replace(
        everything,
        num_kv_heads=2 * heads.num_kv_heads,
        rope=ropes["sliding_attention"],
        rotary_dim=rotary_dim(named["sliding_attention"], heads.head_dim),
        window_tokens=whole(fields, "sliding_window", 128),
        has_sinks=True,
    )
    return {False: everything, True: window}, min(reach(rope, max_tokens) for rope in ropes.values())


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mixer = spec.hidden_size, layer.mixer
    assert isinstance(mixer, AttentionSpec)
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_attention(source, f"{prefix}.self_attn", mixer, hidden, AttentionNames(sinks="attention_sink_bias")),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=take_mlp(source, f"{prefix}.mlp", layer.mlp, hidden),
    )


FAMILY = Family((MIMO_V2_FLASH,), read_spec, take_layer, DEFAULTS, ignored=("model.mtp.",), kinds=FULL_AND_WINDOW)
