"""DeepSeek V3.2 and GLM-MoE-DSA (GLM-5): V3's layers, whose attention goes to the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from worker_service.core.errors import ModelError
from worker_service.model.attention_specs import IndexSpec, LatentSpec
from worker_service.model.families import glm4_moe
from worker_service.model.families.common import DENSE, model_spec, read_num_mtp_layers, read_positions
from worker_service.model.families.deepseek import V3_DEFAULTS, read_latents
from worker_service.model.families.family import Family
from worker_service.model.families.qwen3_moe import read_dense
from worker_service.model.fields import Fields, layer_types, number, whole
from worker_service.model.spec import LayerSpec, ModelSpec, NormSpec
from worker_service.model.take_index import take_sparse_layer

V32 = "DeepseekV32ForCausalLM"
GLM_DSA = "GlmMoeDsaForCausalLM"
GLM_DSA_DEFAULTS: Fields = {
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "index_n_heads": 32,
    "eos_token_id": 1,
}
# What `layer_types` says of every layer.
SPARSE = {"deepseek_sparse_attention": True}
IS_SHARED = {"full": False, "shared": True}
LETTERS = {"F": "full", "S": "shared"}


def read_v32(fields: Fields) -> ModelSpec:
    index = _read_index(fields, default_heads=64, interleaved=False)
    return _read_spec(fields, [index] * whole(fields, "num_hidden_layers"), norm_eps=1e-6)


def read_glm_dsa(fields: Fields) -> ModelSpec:
    """Returns the spec of GLM-5; some layers share the indexer's choice of one before them."""
    index = _read_index(fields, default_heads=32, interleaved=True)
    return _read_spec(fields, [replace(index, is_shared=shared) for shared in _shared_layers(fields)], norm_eps=1e-5)


def _read_spec(fields: Fields, indexes: Sequence[IndexSpec], norm_eps: float) -> ModelSpec:
    layer_types(fields, len(indexes), SPARSE)
    mixer, dense, experts = _read_mixer(fields), read_dense(fields), glm4_moe.read_experts(fields)
    return model_spec(
        fields,
        layers=tuple(
            LayerSpec(replace(mixer, index=index), dense if is_dense else experts)
            for index, is_dense in zip(indexes, _dense_layers(fields), strict=True)
        ),
        norm=NormSpec(number(fields, "rms_norm_eps", norm_eps)),
        max_model_len=read_positions(fields).max_model_len,
        num_mtp_layers=read_num_mtp_layers(fields),
    )


def _read_mixer(fields: Fields) -> LatentSpec:
    if fields.get("q_lora_rank") is None:
        raise ModelError("q_lora_rank", "must be a whole number: the indexer's queries are made of that row")
    return replace(read_latents(fields), interleaved=True)


def _read_index(fields: Fields, default_heads: int, *, interleaved: bool) -> IndexSpec:
    head_dim, rope_dim = whole(fields, "index_head_dim", 128), whole(fields, "qk_rope_head_dim", 64)
    if head_dim < rope_dim:
        raise ModelError("index_head_dim", f"must be at least qk_rope_head_dim {rope_dim}, not {head_dim}")
    heads = whole(fields, "index_n_heads", default_heads)
    return IndexSpec(whole(fields, "index_topk", 2048), heads, head_dim, interleaved)


def _dense_layers(fields: Fields) -> list[bool]:
    """Returns which layers have no experts: by name, else the first ones."""
    num_layers = whole(fields, "num_hidden_layers")
    num_dense = whole(fields, "first_k_dense_replace", 3, least=0)
    named = layer_types(fields, num_layers, DENSE, "mlp_layer_types")
    return named or [layer < num_dense for layer in range(num_layers)]


def _shared_layers(fields: Fields) -> list[bool]:
    """Returns which layers have no indexer: by name, by a pattern, else all but every `index_topk_freq`-th one."""
    num_layers = whole(fields, "num_hidden_layers")
    shared = layer_types(_with_pattern(fields), num_layers, IS_SHARED, "indexer_types")
    if shared is None:
        frequency = whole(fields, "index_topk_freq", 1)
        offset = whole(fields, "index_skip_topk_offset", 2, least=0)
        shared = [max(layer - offset + 1, 0) % frequency > 0 for layer in range(num_layers)]
    if shared[0]:
        raise ModelError("indexer_types", "must give the first layer an indexer of its own, as no layer is before it")
    return shared


def _with_pattern(fields: Fields) -> Fields:
    """Returns the fields with a list of names; where there is none, it is made of a pattern of letters."""
    pattern = fields.get("index_topk_pattern")
    if fields.get("indexer_types") is not None or pattern is None:
        return fields
    names = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    return {**fields, "indexer_types": names}


FAMILY_V32 = Family((V32,), read_v32, take_sparse_layer, V3_DEFAULTS)
FAMILY_GLM_DSA = Family((GLM_DSA,), read_glm_dsa, take_sparse_layer, GLM_DSA_DEFAULTS)
