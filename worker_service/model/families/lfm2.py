"""LFM2: gated short convolutions in most layers, attention in a few.

A convolution's state are the last columns that went into it.
"""

from __future__ import annotations

import math

from kernels.causal_conv import MAX_D_CONV
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.families.common import model_spec, read_heads, read_positions, require_whole_rope
from worker_service.model.families.family import recurrent_family
from worker_service.model.fields import Fields, first_of, flag, layer_types, layers_by_index, number, whole
from worker_service.model.layer_weights import DenseWeights, LayerWeights, ShortConvWeights
from worker_service.model.recurrent_specs import ShortConvSpec
from worker_service.model.spec import DenseSpec, LayerSpec, ModelSpec, NormSpec
from worker_service.model.take_weights import AttentionNames, take_attention, take_linear
from worker_service.model.tensors import TensorSource

LFM2 = "Lfm2ForCausalLM"
DEFAULTS: Fields = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "eos_token_id": 2,
}
ATTENDS = {"full_attention": True, "conv": False}
NAMES = AttentionNames(output="out_proj", head_norm="{head}_layernorm")


def read_spec(fields: Fields) -> ModelSpec:
    require_whole_rope(fields)
    heads, positions = read_heads(fields), read_positions(fields)
    attention = AttentionSpec(*heads, rope=positions.rope, rotary_dim=heads.head_dim, qk_norm=True)
    convolution = ShortConvSpec(whole(fields, "conv_L_cache", 3, least=2, most=MAX_D_CONV), flag(fields, "conv_bias"))
    mlp = DenseSpec(_intermediate_size(fields))
    return model_spec(
        fields,
        layers=tuple(LayerSpec(attention if attends else convolution, mlp) for attends in _attending(fields)),
        norm=NormSpec(number(fields, "norm_eps", 1e-5)),
        max_model_len=positions.max_model_len,
        tied=flag(fields, "tie_embedding", True),
    )


def _intermediate_size(fields: Fields) -> int:
    """Returns the MLP's size: the stated one, or two thirds of it, multiplied and rounded up."""
    stated = whole(fields, first_of(fields, "block_ff_dim", "intermediate_size"))
    multiple, factor = whole(fields, "block_multiple_of", 256), number(fields, "block_ffn_dim_multiplier", 1.0)
    if not flag(fields, "block_auto_adjust_ff_dim", True):
        return stated
    return math.ceil(int(factor * int(2 * stated / 3)) / multiple) * multiple


def _attending(fields: Fields) -> list[bool]:
    """Returns which layers have attention: by `layer_types`, else by `full_attn_idxs`, else all of them."""
    num_layers = whole(fields, "num_hidden_layers")
    by_index = layers_by_index(fields, num_layers, "full_attn_idxs") or [True] * num_layers
    return layer_types(fields, num_layers, ATTENDS) or by_index


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mixer, mlp = spec.hidden_size, layer.mixer, layer.mlp
    assert isinstance(mlp, DenseSpec)
    assert isinstance(mixer, AttentionSpec | ShortConvSpec)
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.operator_norm.weight", hidden),
        mixer=(
            take_attention(source, f"{prefix}.self_attn", mixer, hidden, NAMES)
            if isinstance(mixer, AttentionSpec)
            else _take_convolution(source, f"{prefix}.conv", mixer, hidden)
        ),
        mlp_norm=source.take(f"{prefix}.ffn_norm.weight", hidden),
        mlp=_take_mlp(source, f"{prefix}.feed_forward", mlp, hidden),
    )


def _take_convolution(source: TensorSource, prefix: str, spec: ShortConvSpec, hidden: int) -> ShortConvWeights:
    return ShortConvWeights(
        inner=take_linear(source, [f"{prefix}.in_proj"], [3 * hidden], hidden, bias=spec.bias),
        taps=source.take(f"{prefix}.conv.weight", hidden, 1, spec.width).view(hidden, spec.width),
        bias=source.take(f"{prefix}.conv.bias", hidden) if spec.bias else None,
        output=take_linear(source, [f"{prefix}.out_proj"], [hidden], hidden, bias=spec.bias),
    )


def _take_mlp(source: TensorSource, prefix: str, spec: DenseSpec, hidden: int) -> DenseWeights:
    inner = spec.intermediate_size
    gate_up = take_linear(source, [f"{prefix}.w1", f"{prefix}.w3"], [inner, inner], hidden, bias=False)
    return DenseWeights(gate_up, take_linear(source, [f"{prefix}.w2"], [hidden], inner, bias=False))


FAMILY = recurrent_family(LFM2, read_spec, take_layer, DEFAULTS, final_norm="embedding_norm")
