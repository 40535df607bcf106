"""Cohere2: attention and MLP side by side behind one norm; layers without a window have no rotary embeddings."""

from __future__ import annotations

from dataclasses import replace

from worker_service.model.families.common import (
    model_spec,
    read_activation,
    read_positions,
    read_sliding,
    usual_attention,
)
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.fields import Fields, number, whole
from worker_service.model.layer_weights import LayerWeights
from worker_service.model.spec import Activation, Block, DenseSpec, LayerSpec, ModelSpec, NormKind, NormSpec
from worker_service.model.take_weights import take_dense, take_mixer
from worker_service.model.tensors import TensorSource

COHERE2 = "Cohere2ForCausalLM"
DEFAULTS: Fields = {"eos_token_id": 255001}


def read_spec(fields: Fields) -> ModelSpec:
    positions = read_positions(fields)
    num_layers = whole(fields, "num_hidden_layers")
    pattern = whole(fields, "sliding_window_pattern", 4)
    sliding = read_sliding(fields, num_layers) or [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    everything = usual_attention(fields, rope=None)
    window = replace(
        everything, rope=positions.rope, interleaved=True, window_tokens=whole(fields, "sliding_window", 4096)
    )
    mlp = DenseSpec(whole(fields, "intermediate_size"), read_activation(fields, "hidden_act", (Activation.SILU,)))
    return model_spec(
        fields,
        layers=tuple(LayerSpec(window if slides else everything, mlp) for slides in sliding),
        norm=NormSpec(number(fields, "layer_norm_eps", 1e-5), NormKind.LAYER),
        max_model_len=positions.max_model_len,
        tied=True,
        block=Block.PARALLEL,
        logits_scale=number(fields, "logit_scale", 0.0625),
    )


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mlp = spec.hidden_size, layer.mlp
    assert isinstance(mlp, DenseSpec)
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_mixer(source, f"{prefix}.self_attn", layer.mixer, hidden),
        mlp=take_dense(source, f"{prefix}.mlp", mlp, hidden),
    )


FAMILY = Family((COHERE2,), read_spec, take_layer, DEFAULTS, kinds=FULL_AND_WINDOW)
