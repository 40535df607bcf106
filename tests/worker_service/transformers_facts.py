"""What transformers' config classes make of a config.json, as the same facts."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from tests.worker_service.spec_facts import Facts, Layer, recurrent_layer

Fields = dict[str, Any]
QK_NORMS = ("gemma3_text", "qwen3_moe", "lfm2", "qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EXPERTS_NAMES = ("n_routed_experts", "num_local_experts", "num_experts")
EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "norm_eps")


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
        (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps) if hasattr(config, "hc_mult") else None,
    )


def _layer_of_transformers(config: Any, layer: int) -> Layer:
    if config.model_type in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"):
        return _latent_layer_of_transformers(config, layer)
    if config.model_type == "deepseek_v4":
        return _compressed_layer_of_transformers(config, layer)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "kimi_linear":
        if kinds[layer] == "full_attention":
            return _latent_layer_of_transformers(config, layer)
        names = ("num_heads", "head_dim", "conv_kernel_dim")
        kimi = tuple(getattr(config, f"linear_{name}") for name in names)
        return recurrent_layer(_mlp_of_transformers(config, layer), kimi=kimi)
    if kinds is not None and kinds[layer] == "conv":
        return recurrent_layer(_mlp_of_transformers(config, layer), taps=(config.conv_L_cache, config.conv_bias))
    if kinds is not None and kinds[layer] == "linear_attention":
        names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        delta = tuple(getattr(config, f"linear_{name}") for name in names)
        return recurrent_layer(_mlp_of_transformers(config, layer), delta=delta)
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
    rope = None if config.model_type == "kimi_linear" else config.rope_parameters
    mscale = 1.0 if rope is None else 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope.get("factor", 1.0)) + 1.0
    return Layer(
        (config.num_attention_heads, config.num_attention_heads, config.qk_head_dim),
        config.v_head_dim,
        1.0,
        0,
        None if rope is None else _rope_of_transformers(rope),
        config.qk_rope_head_dim,
        config.qk_head_dim**-0.5 * mscale**2,
        0.0,
        (config.attention_bias, config.attention_bias),
        False,
        _mlp_of_transformers(config, layer),
        (config.q_lora_rank or 0, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim),
        index=_index_of_transformers(config, layer),
    )


def _compressed_layer_of_transformers(config: Any, layer: int) -> Layer:
    kind = config.layer_types[layer]
    ratio = 0 if kind == "sliding_attention" else config.compress_rates[kind]
    return Layer(
        (config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        config.head_dim,
        1.0,
        config.sliding_window,
        _rope_of_transformers(config.rope_parameters["compress" if ratio else "main"]),
        config.qk_rope_head_dim,
        config.head_dim**-0.5,
        0.0,
        (config.attention_bias, config.attention_bias),
        False,
        _mlp_of_transformers(config, layer),
        index=_index_of_transformers(config, layer) if kind == "compressed_sparse_attention" else None,
        entries=(config.q_lora_rank, config.o_groups, config.o_lora_rank, ratio),
    )


def _index_of_transformers(config: Any, layer: int) -> tuple[int, int, int, bool] | None:
    if not hasattr(config, "index_topk"):
        return None
    is_shared = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers)[layer] == "shared"
    return config.index_n_heads, config.index_head_dim, config.index_topk, is_shared


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
        getattr(config, "n_group", None) or 1,
        getattr(config, "topk_group", None) or 1,
        getattr(config, "shared_expert_intermediate_size", inner * getattr(config, "n_shared_experts", 0)),
        config.model_type == "deepseek_v4" and config.mlp_layer_types[layer] == "hash_moe",
    )


def _has_experts(config: Any, layer: int) -> bool:
    if hasattr(config, "mlp_layer_types"):
        return bool(config.mlp_layer_types[layer] != "dense")
    if hasattr(config, "first_k_dense_replace"):
        return bool(layer >= config.first_k_dense_replace)
    if hasattr(config, "decoder_sparse_step"):
        return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    return hasattr(config, "num_local_experts") or hasattr(config, "num_experts")
