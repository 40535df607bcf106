"""config.json as authors publish them, held against transformers' config classes: also where a field is left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from tests.worker_service.published_configs import PUBLISHED
from tests.worker_service.spec_facts import facts_of_spec
from tests.worker_service.transformers_facts import Fields, facts_of_transformers
from worker_service.core.errors import ModelError
from worker_service.model.config import parse_model_spec
from worker_service.model.families import FAMILIES
from worker_service.model.families.family import Family

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
    "pretraining_tp",
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
# What transformers' model does not read either.
V4_UNREAD = {"attention_bias", "expert_dtype", "norm_topk_prob", "topk_method"}
V3_UNREAD = {"moe_layer_freq", "num_key_value_heads", "scoring_func", "topk_method"}
UNREAD_BY = {
    "google/gemma-2-9b": {"hidden_act"},
    "Qwen/Qwen3-8B": {"sliding_window"},
    "Qwen/Qwen3-30B-A3B": {"sliding_window"},
    "CohereLabs/c4ai-command-r7b-12-2024": {"use_qk_norm"},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {"use_sliding_window"},
    # The wrapper's own say whether the head is the embeddings.
    "Qwen/Qwen3.5-0.8B": {"mlp_only_layers", "tie_word_embeddings"},
    "Qwen/Qwen3.5-35B-A3B": {"mlp_only_layers"},
    # Its attention sees no positions.
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": {"head_dim", "num_key_value_heads", "rope_scaling", "rope_theta"},
    # Its experts are in no groups, and their weights are as the router gives them.
    "deepseek-ai/DeepSeek-V2-Lite": {
        "aux_loss_alpha",
        "moe_layer_freq",
        "n_group",
        "norm_topk_prob",
        "num_key_value_heads",
        "scoring_func",
        "seq_aux",
        "topk_group",
    },
    "deepseek-ai/DeepSeek-V3": V3_UNREAD,
    "deepseek-ai/DeepSeek-V4-Flash": V4_UNREAD,
    "deepseek-ai/DeepSeek-V4-Pro": V4_UNREAD,
    "deepseek-ai/DeepSeek-V3.2-Exp": V3_UNREAD,
    "zai-org/GLM-4.7-Flash": {"first_k_dense_replace", "num_key_value_heads", "partial_rotary_factor", "topk_method"},
    "zai-org/GLM-5": {*V3_UNREAD, "head_dim", "indexer_rope_interleave"},
    "GLM-5 with shared choices": {*V3_UNREAD, "head_dim", "indexer_rope_interleave"},
}


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
