"""Gemma 2 and Gemma 3: windows in most layers, norms on both sides of each branch, weights of norms counted from one.

Gemma 2 caps scores and logits; Gemma 3 norms the heads, and its layers with a window have a rope of their own. Files
of Gemma 3 leave out most fields; what is missing has the value that transformers gives it.
"""

from __future__ import annotations

from dataclasses import replace

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import AttentionSpec, RopeConfig
from worker_service.model.families.common import SLIDING, model_spec, read_activation, read_sliding, usual_attention
from worker_service.model.families.family import FULL_AND_WINDOW, Family
from worker_service.model.fields import Fields, flag, number, whole
from worker_service.model.layer_weights import LayerWeights
from worker_service.model.rope_fields import read_rope, read_ropes, rope_of
from worker_service.model.spec import Activation, Block, DenseSpec, LayerSpec, ModelSpec, NormKind, NormSpec
from worker_service.model.take_weights import take_dense, take_mixer
from worker_service.model.tensors import TensorSource

GEMMA2 = "Gemma2ForCausalLM"
GEMMA3 = "Gemma3ForCausalLM"
GEMMA3_WRAPPER = "Gemma3ForConditionalGeneration"
GEMMA2_DEFAULTS: Fields = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "eos_token_id": 1,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window_pattern": 2,
}
GEMMA3_DEFAULTS: Fields = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "sliding_window_pattern": 6,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def read_gemma2(fields: Fields) -> ModelSpec:
    rope = read_rope(fields, whole(fields, "max_position_embeddings"))
    return _read_spec(fields, replace(_attention(fields), rope=rope), dict.fromkeys((False, True), rope))


def read_gemma3(fields: Fields) -> ModelSpec:
    return _read_spec(fields, replace(_attention(fields), qk_norm=True), _gemma3_ropes(fields))


def _read_spec(fields: Fields, mixer: AttentionSpec, ropes: dict[bool, RopeConfig]) -> ModelSpec:
    """Returns the spec; `ropes` are those of layers without and with a window."""
    mlp = DenseSpec(
        whole(fields, "intermediate_size", 9216),
        read_activation(fields, "hidden_activation", (Activation.GELU_TANH,)),
    )
    hidden = whole(fields, "hidden_size", 2304)
    window = whole(fields, "sliding_window", 4096)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(replace(mixer, rope=ropes[slides], window_tokens=window if slides else 0), mlp)
            for slides in _sliding(fields)
        ),
        norm=NormSpec(number(fields, "rms_norm_eps", 1e-6), NormKind.RMS_PLUS_ONE),
        # Files say how far the model reaches, the factor of its rope included.
        max_model_len=whole(fields, "max_position_embeddings"),
        tied=True,
        block=Block.SANDWICH,
        embedding_scale=hidden**0.5,
        logits_softcap=_cap(fields, "final_logit_softcapping"),
    )


def _attention(fields: Fields) -> AttentionSpec:
    if flag(fields, "use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention", "true is not supported; false is")
    scale = number(fields, "query_pre_attn_scalar", 256) ** -0.5
    return usual_attention(fields, rope=None, scale=scale, softcap=_cap(fields, "attn_logit_softcapping"))


def _cap(fields: Fields, name: str) -> float:
    return 0.0 if fields.get(name) is None else number(fields, name)


def _sliding(fields: Fields) -> list[bool]:
    """Returns which layers have the window: by `layer_types`, else all but each n-th one."""
    num_layers = whole(fields, "num_hidden_layers")
    pattern = whole(fields, "sliding_window_pattern")
    default = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return read_sliding(fields, num_layers) or default


def _gemma3_ropes(fields: Fields) -> dict[bool, RopeConfig]:
    """Reads both spellings: a rope by kind of layer, or `rope_theta` and `rope_scaling` for the layers without a window
    and `rope_local_base_freq` for the others."""
    max_tokens = whole(fields, "max_position_embeddings")
    named = read_ropes(fields, tuple(SLIDING), max_tokens)
    if named is not None:
        return {slides: named[kind] for kind, slides in SLIDING.items()}
    scaling = fields.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError("rope_scaling", f"must be an object, not {scaling!r}")
    return {
        False: rope_of(scaling, number(fields, "rope_theta", GLOBAL_THETA), max_tokens),
        True: rope_of({}, number(fields, "rope_local_base_freq", LOCAL_THETA), max_tokens),
    }


def take_layer(source: TensorSource, prefix: str, spec: ModelSpec, layer: LayerSpec) -> LayerWeights:
    hidden, mlp = spec.hidden_size, layer.mlp
    assert isinstance(mlp, DenseSpec)
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        mixer=take_mixer(source, f"{prefix}.self_attn", layer.mixer, hidden),
        norm_behind_mixer=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp_norm=source.take(f"{prefix}.pre_feedforward_layernorm.weight", hidden),
        mlp=take_dense(source, f"{prefix}.mlp", mlp, hidden),
        norm_behind_mlp=source.take(f"{prefix}.post_feedforward_layernorm.weight", hidden),
    )


FAMILY2 = Family((GEMMA2,), read_gemma2, take_layer, GEMMA2_DEFAULTS, kinds=FULL_AND_WINDOW)
FAMILY3 = Family(
    (GEMMA3, GEMMA3_WRAPPER),
    read_gemma3,
    take_layer,
    GEMMA3_DEFAULTS,
    roots=("model.", "language_model.model.", "model.language_model."),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    kinds=FULL_AND_WINDOW,
)
