"""config.json as authors publish them, held against transformers' config classes: also where a field is left out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from tests.worker_service.published_configs import PUBLISHED
from worker_service.core.errors import ModelError
from worker_service.model.config import parse_model_spec
from worker_service.model.families import FAMILIES
from worker_service.model.families.family import Family
from worker_service.model.recurrent_specs import GatedDeltaSpec, ShortConvSpec
from worker_service.model.spec import (
    AttentionSpec,
    DenseSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    RopeConfig,
)

Fields = dict[str, Any]
# These say which family it is.
NAMES = {"architectures", "model_type"}
# Without the first field the second one contradicts what is left.
CONTRADICTIONS = {
    ("google/gemma-3-27b-it", "num_attention_heads"): "num_key_value_heads",
    ("zai-org/GLM-4.5", "head_dim"): "num_attention_heads",
}
# What a reader has no use for, whatever it is; `dtype` is checked when the weights are loaded.
UNREAD = {
    "attention_dropout",
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "bos_token_id",
    "cache_implementation",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "dtype",
    "experts_per_token",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "initial_context_length",
    "initializer_range",
    "ep_size",
    "layer_switch",
    "max_window_layers",
    "num_heads",
    "order_of_interleaved_layers",
    "output_router_logits",
    "pad_token_id",
    "position_embedding_type",
    "rotary_pct",
    "router_aux_loss_coef",
    "sliding_window_size",
    "torch_dtype",
    "use_cache",
    "use_embedding_sharing",
    "use_gated_activation",
    "use_parallel_block",
    "use_parallel_embedding",
    "use_pos_enc",
}
UNREAD_BY = {
    "google/gemma-2-9b": {"hidden_act"},
    "Qwen/Qwen3-30B-A3B": {"sliding_window"},
    "CohereLabs/c4ai-command-r7b-12-2024": {"use_qk_norm"},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {"use_sliding_window"},
    # The wrapper's own say whether the head is the embeddings.
    "Qwen/Qwen3.5-0.8B": {"mlp_only_layers", "tie_word_embeddings"},
    "Qwen/Qwen3.5-35B-A3B": {"mlp_only_layers"},
    "deepseek-ai/DeepSeek-V3": {"moe_layer_freq", "num_key_value_heads", "scoring_func", "topk_method"},
}


QK_NORMS = ("gemma3_text", "qwen3_moe", "lfm2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EXPERTS_NAMES = ("n_routed_experts", "num_local_experts", "num_experts")
EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "norm_eps")


class Layer(NamedTuple):
    """What makes one layer.

    latents   ranks of queries and of latents, and the elements of a head without and with a rotation
    mlp       the experts' number, size, choice, scale, groups and the shared one's size
    taps      of a short convolution, and whether it has biases; there are no heads then
    delta     of the gated delta rule the heads of values and of keys, the elements of a key and of a value, and taps
    """

    heads: tuple[int, int, int]
    value_dim: int
    value_scale: float
    window: int
    rope: dict[str, Any] | None
    rotary_dim: int
    scale: float
    softcap: float
    biases: tuple[bool, bool]
    qk_norm: bool
    mlp: tuple[Any, ...]
    latents: tuple[int, int, int, int] | None = None
    taps: tuple[int, bool] | None = None
    delta: tuple[int, int, int, int, int] | None = None


class Facts(NamedTuple):
    vocab_size: int
    hidden_size: int
    max_model_len: int
    eps: float
    tied: bool
    eos: tuple[int, ...]
    embedding_scale: float
    logits_scale: float
    logits_softcap: float
    layers: tuple[Layer, ...]


def facts_of_spec(spec: ModelSpec) -> Facts:
    return Facts(
        spec.vocab_size,
        spec.hidden_size,
        spec.max_model_len,
        spec.norm.eps,
        spec.tied_embeddings,
        spec.eos_token_ids,
        spec.embedding_scale,
        spec.logits_scale,
        spec.logits_softcap,
        tuple(_layer_of_spec(layer) for layer in spec.layers),
    )


def _layer_of_spec(layer: LayerSpec) -> Layer:
    mixer = layer.mixer
    if isinstance(mixer, LatentSpec):
        return _latent_layer(mixer, _mlp_of_spec(layer.mlp))
    if isinstance(mixer, ShortConvSpec):
        return _recurrent(_mlp_of_spec(layer.mlp), taps=(mixer.width, mixer.bias))
    if isinstance(mixer, GatedDeltaSpec):
        heads = (mixer.num_heads, mixer.num_k_heads)
        return _recurrent(_mlp_of_spec(layer.mlp), delta=(*heads, mixer.key_dim, mixer.value_dim, mixer.width))
    assert isinstance(mixer, AttentionSpec)
    return Layer(
        (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim),
        mixer.value_dim or mixer.head_dim,
        mixer.value_scale,
        mixer.window_tokens,
        None if mixer.rope is None else _rope_of_spec(mixer.rope),
        mixer.rotary_dim,
        mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
        mixer.softcap,
        (mixer.qkv_bias, mixer.output_bias),
        mixer.qk_norm,
        _mlp_of_spec(layer.mlp),
    )


def _recurrent(mlp: tuple[Any, ...], **what: Any) -> Layer:
    return Layer((0, 0, 0), 0, 1.0, 0, None, 0, 0.0, 0.0, (False, False), False, mlp, **what)


def _latent_layer(mixer: LatentSpec, mlp: tuple[Any, ...]) -> Layer:
    head_dim = mixer.nope_dim + mixer.rope_dim
    return Layer(
        (mixer.num_heads, mixer.num_heads, head_dim),
        mixer.value_dim,
        1.0,
        0,
        _rope_of_spec(mixer.rope),
        mixer.rope_dim,
        mixer.scale,
        0.0,
        (mixer.bias, mixer.bias),
        False,
        mlp,
        (mixer.q_rank, mixer.latent_dim, mixer.nope_dim, mixer.rope_dim),
    )


def _rope_of_spec(rope: RopeConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"rope_type": rope.kind.value, "rope_theta": rope.theta}
    if rope.kind.value != "default":
        facts["factor"] = rope.factor
    if rope.kind.value == "yarn":
        facts["original_max_position_embeddings"] = rope.original_max_tokens
        facts.update(beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)
    return facts


def _mlp_of_spec(mlp: DenseSpec | MoeSpec) -> tuple[Any, ...]:
    if isinstance(mlp, DenseSpec):
        return ("dense", mlp.intermediate_size)
    rule, shared = mlp.rule, mlp.shared.intermediate_size if mlp.shared else 0
    chosen = (rule.top_k, rule.renormalise, rule.scale, rule.num_groups, rule.top_groups)
    return ("experts", mlp.num_experts, mlp.intermediate_size, *chosen, shared)


def facts_of_transformers(fields: Fields) -> Facts:
    """What transformers' config class makes of the file; where its models read a config, so does this."""
    given = {name: value for name, value in fields.items() if name != "model_type"}
    whole = CONFIG_MAPPING[fields["model_type"]](**given)
    config: Any = whole.get_text_config()
    eos = whole.eos_token_id if getattr(whole, "eos_token_id", None) is not None else config.eos_token_id
    is_gemma = config.model_type.startswith("gemma")
    return Facts(
        config.vocab_size,
        config.hidden_size,
        config.max_position_embeddings,
        next(getattr(config, name) for name in EPS_NAMES if hasattr(config, name)),
        whole.tie_word_embeddings,
        tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        config.hidden_size**0.5 if is_gemma else 1.0,
        getattr(config, "logit_scale", 1.0),
        getattr(config, "final_logit_softcapping", None) or 0.0,
        tuple(_layer_of_transformers(config, layer) for layer in range(config.num_hidden_layers)),
    )


def _layer_of_transformers(config: Any, layer: int) -> Layer:
    if config.model_type == "deepseek_v3":
        return _latent_layer_of_transformers(config, layer)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "conv":
        return _recurrent(_mlp_of_transformers(config, layer), taps=(config.conv_L_cache, config.conv_bias))
    if kinds is not None and kinds[layer] == "linear_attention":
        names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        delta = tuple(getattr(config, f"linear_{name}") for name in names)
        return _recurrent(_mlp_of_transformers(config, layer), delta=delta)
    window = getattr(config, "sliding_window", None) or 0
    slides = bool(window) if kinds is None else kinds[layer] == "sliding_attention"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    is_mimo = config.model_type == "mimo_v2_flash"
    rope = config.rope_parameters
    if kinds is not None and kinds[layer] in rope:
        rope = rope[kinds[layer]]
    if config.model_type == "cohere2" and not slides:
        rope = None
    share = (rope or {}).get("partial_rotary_factor", 1.0)
    bias = getattr(config, "attention_bias", False)
    value_scale = getattr(config, "attention_value_scale", 1.0)
    return Layer(
        (config.num_attention_heads, config.num_key_value_heads * (2 if is_mimo and slides else 1), head_dim),
        getattr(config, "v_head_dim", head_dim),
        1.0 if value_scale is None else value_scale,
        window if slides else 0,
        None if rope is None else _rope_of_transformers(rope),
        int(head_dim * share),
        getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5,
        getattr(config, "attn_logit_softcapping", None) or 0.0,
        (bias, bias and config.model_type not in ("glm4_moe", "mimo_v2_flash")),
        config.model_type in QK_NORMS or getattr(config, "use_qk_norm", False) is True,
        _mlp_of_transformers(config, layer),
    )


def _latent_layer_of_transformers(config: Any, layer: int) -> Layer:
    rope = config.rope_parameters
    mscale = 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope.get("factor", 1.0)) + 1.0
    return Layer(
        (config.num_attention_heads, config.num_attention_heads, config.qk_head_dim),
        config.v_head_dim,
        1.0,
        0,
        _rope_of_transformers(rope),
        config.qk_rope_head_dim,
        config.qk_head_dim**-0.5 * mscale**2,
        0.0,
        (config.attention_bias, config.attention_bias),
        False,
        _mlp_of_transformers(config, layer),
        (config.q_lora_rank or 0, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim),
    )


def _rope_of_transformers(rope: Fields) -> dict[str, Any]:
    facts = {"rope_type": rope["rope_type"], "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        facts["factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        facts["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        facts.update(
            beta_fast=rope.get("beta_fast") or 32,
            beta_slow=rope.get("beta_slow") or 1,
            truncate=rope.get("truncate", True),
        )
    return facts


def _mlp_of_transformers(config: Any, layer: int) -> tuple[Any, ...]:
    if config.model_type == "lfm2":
        with torch.device("meta"):
            return ("dense", Lfm2MLP(config).w1.out_features)
    if not _has_experts(config, layer):
        return ("dense", config.intermediate_size)
    always = config.model_type in ("gpt_oss", "mixtral")
    inner = config.intermediate_size if always else config.moe_intermediate_size
    return (
        "experts",
        next(getattr(config, name) for name in EXPERTS_NAMES if hasattr(config, name)),
        inner,
        config.num_experts_per_tok,
        always or getattr(config, "norm_topk_prob", True),
        getattr(config, "routed_scaling_factor", 1.0),
        getattr(config, "n_group", 1),
        getattr(config, "topk_group", 1),
        getattr(config, "shared_expert_intermediate_size", inner * getattr(config, "n_shared_experts", 0)),
    )


def _has_experts(config: Any, layer: int) -> bool:
    if hasattr(config, "mlp_layer_types"):
        return bool(config.mlp_layer_types[layer] == "sparse")
    if hasattr(config, "first_k_dense_replace"):
        return bool(layer >= config.first_k_dense_replace)
    if hasattr(config, "decoder_sparse_step"):
        return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    return hasattr(config, "num_local_experts") or hasattr(config, "num_experts")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_says_what_transformers_reads(name: str) -> None:
    fields = PUBLISHED[name]
    spec = parse_model_spec(fields)
    assert facts_of_spec(spec) == facts_of_transformers(fields)
    said = {**language_fields(fields), **fields}
    assert spec.dtype == said.get("dtype", said.get("torch_dtype", "float32"))


def language_fields(fields: Fields) -> Fields:
    nested: Fields | None = fields.get("text_config")
    return fields if nested is None else nested


def with_language_fields(fields: Fields, changed: Fields) -> Fields:
    return changed if "text_config" not in fields else {**fields, "text_config": changed}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_file_leaves_out_has_transformers_value_or_is_named(name: str) -> None:
    published, num_compared = PUBLISHED[name], 0
    said = language_fields(published)
    for left_out in said.keys() - NAMES:
        rest = {field: value for field, value in said.items() if field != left_out}
        fields = with_language_fields(published, rest)
        try:
            spec = parse_model_spec(fields)
        except ModelError as error:
            assert error.field == CONTRADICTIONS.get((name, left_out), left_out)
            continue
        assert facts_of_spec(spec) == facts_of_transformers(fields), left_out
        num_compared += 1
    assert num_compared >= 5


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.defaults], ids=lambda one: one.architectures[0]
)
def test_defaults_are_those_of_transformers_classes(family: Family) -> None:
    for architecture in family.architectures:
        config: Any = getattr(transformers, architecture).config_class().get_text_config()
        stated = {name: value for name, value in family.defaults.items() if hasattr(config, name)}
        assert stated
        assert stated == {name: getattr(config, name) for name in stated}


@pytest.mark.parametrize("wrong", ["?", ["?"], math.nan])
@pytest.mark.parametrize("name", PUBLISHED)
def test_errors_name_the_field(name: str, wrong: Any) -> None:
    published, accepted = PUBLISHED[name], set()
    said = language_fields(published)
    for field in said.keys() - NAMES:
        try:
            parse_model_spec(with_language_fields(published, {**said, field: wrong}))
        except ModelError as error:
            assert error.field == field
        else:
            accepted.add(field)
    assert accepted == said.keys() & (UNREAD | UNREAD_BY.get(name, set()))


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("openai/gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("openai/gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act"),
        ("openai/gpt-oss-20b", {"layer_types": ["full_attention"] * 23}, "layer_types"),
        ("openai/gpt-oss-20b", {"layer_types": [["full_attention"]] * 24}, "layer_types"),
        ("google/gemma-2-9b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("google/gemma-2-9b", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("mistralai/Mixtral-8x7B-v0.1", {"rope_scaling": "yarn"}, "rope_scaling"),
        ("mistralai/Mixtral-8x7B-v0.1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("zai-org/GLM-4.5", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("zai-org/GLM-4.5", {"partial_rotary_factor": math.inf}, "partial_rotary_factor"),
        ("CohereLabs/c4ai-command-r7b-12-2024", {"layer_types": "sliding_attention"}, "layer_types"),
        ("LiquidAI/LFM2-1.2B", {"full_attn_idxs": [2, 16]}, "full_attn_idxs"),
        ("LiquidAI/LFM2-1.2B", {"full_attn_idxs": [True]}, "full_attn_idxs"),
        ("LiquidAI/LFM2-1.2B", {"layer_types": ["sliding_attention"] * 16}, "layer_types"),
        ("LiquidAI/LFM2-1.2B", {"conv_L_cache": 1}, "conv_L_cache"),
        ("XiaomiMiMo/MiMo-V2-Flash", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
        ("XiaomiMiMo/MiMo-V2-Flash", {"mlp_layer_types": [["dense"]] * 48}, "mlp_layer_types"),
    ],
)
def test_what_is_not_served_is_named(name: str, changes: Fields, field: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_spec({**PUBLISHED[name], **changes})
    assert caught.value.field == field


def test_a_null_cap_is_no_cap() -> None:
    """A file that leaves the caps out has transformers' own."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    fields = {**PUBLISHED["google/gemma-2-9b"], **dict.fromkeys(caps)}
    spec = parse_model_spec(fields)
    assert facts_of_spec(spec) == facts_of_transformers(fields)
    assert (spec.logits_softcap, _layer_of_spec(spec.layers[0]).softcap) == (0.0, 0.0)


def test_a_rope_without_a_share_turns_what_transformers_turns() -> None:
    ropes = {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")}
    spec = parse_model_spec({**PUBLISHED["XiaomiMiMo/MiMo-V2-Flash"], "rope_parameters": ropes})
    # Elements of a head of 192: transformers' model takes a share of 0.334 where none is given.
    assert {_layer_of_spec(layer).rotary_dim for layer in spec.layers} == {64}


@pytest.mark.parametrize(
    "changes",
    [
        {"block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_multiple_of": 1000},
        {"block_ff_dim": 6656},
        {"layer_types": ["conv"] * 15 + ["full_attention"]},
        {"full_attn_idxs": None},
        {"conv_bias": True},
        {"tie_embedding": False},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_lfm2_reads_as_transformers_does(changes: Fields) -> None:
    fields = {**PUBLISHED["LiquidAI/LFM2-1.2B"], **changes}
    assert facts_of_spec(parse_model_spec(fields)) == facts_of_transformers(fields)


def test_lfm2_without_a_size_of_its_own_has_the_usual_one() -> None:
    published = PUBLISHED["LiquidAI/LFM2-1.2B"]
    fields = {**{name: published[name] for name in published.keys() - {"block_ff_dim"}}, "intermediate_size": 10_752}
    assert facts_of_spec(parse_model_spec(fields)) == facts_of_transformers(fields)
