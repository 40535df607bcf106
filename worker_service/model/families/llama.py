"""Llama, Qwen2, Qwen3 and Mistral: one layer, that differs by biases, norms of the heads, and windows."""

from __future__ import annotations

from dataclasses import replace

from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import (
    architecture_of,
    model_spec,
    read_activation,
    read_heads,
    read_positions,
    read_sliding,
    require_whole_rope,
)
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.fields import Fields, flag, number, whole
from worker_service.model.spec import Activation, DenseSpec, LayerSpec, ModelSpec, NormSpec
from worker_service.model.take_weights import take_layer

LLAMA = "LlamaForCausalLM"
QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
MISTRAL = "MistralForCausalLM"
QWEN3_HEAD_DIM = 128


def read_spec(fields: Fields) -> ModelSpec:
    positions = read_positions(fields)
    architecture = architecture_of(fields)
    mlp = DenseSpec(
        whole(fields, "intermediate_size"),
        read_activation(fields, "hidden_act", (Activation.SILU,)),
        bias=architecture == LLAMA and flag(fields, "mlp_bias"),
    )
    mixer = read_attention(architecture, fields)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(replace(mixer, window_tokens=window), mlp) for window in read_windows(architecture, fields)
        ),
        norm=NormSpec(number(fields, "rms_norm_eps")),
        max_model_len=positions.max_model_len,
    )


def read_attention(architecture: str, fields: Fields) -> AttentionSpec:
    """Returns the attention of a layer without a window."""
    require_whole_rope(fields)
    heads = read_heads(fields, QWEN3_HEAD_DIM if architecture == QWEN3 else None)
    bias = flag(fields, "attention_bias")
    return AttentionSpec(
        *heads,
        rope=read_positions(fields).rope,
        rotary_dim=heads.head_dim,
        qk_norm=architecture == QWEN3,
        qkv_bias=architecture == QWEN2 or (architecture != MISTRAL and bias),
        output_bias=architecture in (LLAMA, QWEN3) and bias,
    )


def read_windows(architecture: str, fields: Fields) -> tuple[int, ...]:
    """Returns each layer's sliding window. Qwen has a switch and mixes layers; Mistral's null means no window."""
    num_layers = whole(fields, "num_hidden_layers")
    if architecture == LLAMA:
        return (0,) * num_layers
    if architecture == MISTRAL:
        window = 0 if fields.get("sliding_window", 4096) is None else whole(fields, "sliding_window", 4096)
        return (window,) * num_layers
    if not flag(fields, "use_sliding_window") or fields.get("sliding_window") is None:
        return (0,) * num_layers
    window = whole(fields, "sliding_window")
    sliding = read_sliding(fields, num_layers)
    if sliding is None:
        first = whole(fields, "max_window_layers", 28, least=0)
        sliding = [layer >= first for layer in range(num_layers)]
    return tuple(window if slides else 0 for slides in sliding)


FAMILY = Family((LLAMA,), read_spec, take_layer, {"eos_token_id": 2})
FAMILY_QWEN = Family((QWEN2, QWEN3), read_spec, take_layer, kinds=FULL_AND_WINDOW)
FAMILY_MISTRAL = Family(
    (MISTRAL,), read_spec, take_layer, {"eos_token_id": 2, "num_key_value_heads": 8}, kinds=FULL_AND_WINDOW
)
