"""config.json with fields that its author did not choose: read as transformers does, or named in the error."""

from __future__ import annotations

import math

import pytest

from tests.worker_service.published_configs import PUBLISHED
from tests.worker_service.spec_facts import facts_of_spec, layer_of_spec
from tests.worker_service.transformers_facts import Fields, facts_of_transformers
from worker_service.core.errors import ModelError
from worker_service.model.config import parse_model_spec


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
        ("deepseek-ai/DeepSeek-V3.2-Exp", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", {"index_head_dim": 32}, "index_head_dim"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", {"index_topk": 0}, "index_topk"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", {"layer_types": ["full_attention"] * 61}, "layer_types"),
        ("zai-org/GLM-5", {"indexer_types": ["full"] * 77}, "indexer_types"),
        ("zai-org/GLM-5", {"indexer_types": ["shared"] + ["full"] * 77}, "indexer_types"),
        ("zai-org/GLM-5", {"index_topk_pattern": "FX"}, "indexer_types"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"compress_ratios": [4] * 42}, "compress_ratios"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"compress_ratios": [8] * 43}, "compress_ratios"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"layer_types": ["full_attention"] * 43}, "layer_types"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"mlp_layer_types": ["sparse"] * 43}, "mlp_layer_types"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"o_groups": 7}, "o_groups"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"index_head_dim": 32}, "index_head_dim"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"qk_rope_head_dim": 1024}, "qk_rope_head_dim"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"swiglu_limit": 7.0}, "swiglu_limit"),
        ("deepseek-ai/DeepSeek-V4-Flash", {"n_shared_experts": 2}, "n_shared_experts"),
        ("LiquidAI/LFM2-1.2B", {"conv_L_cache": 9}, "conv_L_cache"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"attn_output_gate": False}, "attn_output_gate"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"output_gate_type": "sigmoid"}, "output_gate_type"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 0}, "full_attention_interval"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"layer_types": ["mamba"] * 48}, "layer_types"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"linear_key_head_dim": 512}, "linear_key_head_dim"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"linear_num_key_heads": 12}, "linear_num_key_heads"),
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
    assert (spec.logits_softcap, layer_of_spec(spec.layers[0]).softcap) == (0.0, 0.0)


def test_a_rope_without_a_share_turns_what_transformers_turns() -> None:
    ropes = {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")}
    spec = parse_model_spec({**PUBLISHED["XiaomiMiMo/MiMo-V2-Flash"], "rope_parameters": ropes})
    # Elements of a head of 192: transformers' model takes a share of 0.334 where none is given.
    assert {layer_of_spec(layer).rotary_dim for layer in spec.layers} == {64}


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


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_freq": 2, "index_skip_topk_offset": 5},
        {"index_topk_pattern": "FFSSSF" * 13},
        {"index_topk_pattern": ["full", "shared"] * 39, "index_topk_freq": 5},
        {"indexer_types": ["full", "shared"] * 39, "index_topk_pattern": "F" * 78},
        {"mlp_layer_types": ["dense", "sparse"] * 39},
        {"first_k_dense_replace": 0},
    ],
    ids=str,
)
def test_glm_5_reads_as_transformers_does(changes: Fields) -> None:
    fields = {**PUBLISHED["zai-org/GLM-5"], **changes}
    assert facts_of_spec(parse_model_spec(fields)) == facts_of_transformers(fields)


V4_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    "changes",
    [
        # As later files do: of layers that predict ahead there are more.
        {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0]},
        {"compress_ratios": None},
        {"compress_ratios": None, "layer_types": ["sliding_attention"] + ["heavily_compressed_attention"] * 42},
        {"num_hash_layers": 0},
        {"num_hash_layers": 60},
        {"mlp_layer_types": ["moe"] * 42 + ["hash_moe"], "num_hash_layers": None},
        {"partial_rotary_factor": 0.25},
        {"rope_scaling": V4_YARN, "compress_rope_theta": 40_000},
        {"rope_scaling": None},
    ],
    ids=str,
)
def test_deepseek_v4_reads_as_transformers_does(changes: Fields) -> None:
    fields = {**PUBLISHED["deepseek-ai/DeepSeek-V4-Flash"], **changes}
    assert facts_of_spec(parse_model_spec(fields)) == facts_of_transformers(fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"full_attention_interval": 2},
        {"layer_types": ["full_attention"] + ["linear_attention"] * 47},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 5]},
        {"partial_rotary_factor": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}},
        {"norm_topk_prob": False},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_qwen3_next_reads_as_transformers_does(changes: Fields) -> None:
    fields = {**PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"], **changes}
    ours, theirs = facts_of_spec(parse_model_spec(fields)), facts_of_transformers(fields)
    # Cards add a factor and leave max_position_embeddings as it was trained; how far that reaches is our reading.
    assert ours._replace(max_model_len=theirs.max_model_len) == theirs


KIMI = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
KIMI_LINEAR = PUBLISHED[KIMI]["linear_attn_config"]


@pytest.mark.parametrize(
    "changes",
    [
        # As transformers writes it.
        {
            "linear_attn_config": None,
            "layer_types": ["full_attention"] + ["linear_attention"] * 26,
            "mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 25,
            "linear_num_heads": 8,
            "linear_head_dim": 64,
            "linear_conv_kernel_dim": 3,
        },
        {"linear_attn_config": {**KIMI_LINEAR, "num_heads": 16}, "linear_num_heads": 8},
        {"linear_attn_config": {"head_dim": 64}},
        {"layer_types": ["full_attention"] * 27},
        {"first_k_dense_replace": 3},
        {"first_k_dense_replace": 0},
        {"q_lora_rank": 1536, "attention_bias": True},
        {"num_expert_group": 8, "topk_group": 4, "moe_renormalize": False, "num_shared_experts": 2},
        {"model_max_length": None, "max_position_embeddings": 4096},
    ],
    ids=str,
)
def test_kimi_linear_reads_as_transformers_does(changes: Fields) -> None:
    fields = {name: value for name, value in {**PUBLISHED[KIMI], **changes}.items() if value is not None}
    assert facts_of_spec(parse_model_spec(fields)) == facts_of_transformers(fields)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"use_grouped_topk": False}, "use_grouped_topk"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"attn_res_block_size": 12}, "attn_res_block_size"),
        ({"routed_expert_hidden_size": 3584}, "routed_expert_hidden_size"),
        ({"linear_attn_config": {**KIMI_LINEAR, "gate_lower_bound": -5.0}}, "linear_attn_config"),
        ({"linear_attn_config": {**KIMI_LINEAR, "use_full_rank_gate": True}}, "linear_attn_config"),
        ({"linear_attn_config": {**KIMI_LINEAR, "kda_layers": [1, 2]}}, "linear_attn_config"),
        (
            {"linear_attn_config": {**KIMI_LINEAR, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27.0]}},
            "linear_attn_config",
        ),
        ({"linear_attn_config": {**KIMI_LINEAR, "head_dim": 512}}, "linear_head_dim"),
        ({"linear_attn_config": {**KIMI_LINEAR, "short_conv_kernel_size": 9}}, "linear_conv_kernel_dim"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_what_is_not_served_of_kimi_linear_is_named(changes: Fields, field: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_spec({**PUBLISHED[KIMI], **changes})
    assert caught.value.field == field


def test_lfm2_without_a_size_of_its_own_has_the_usual_one() -> None:
    published = PUBLISHED["LiquidAI/LFM2-1.2B"]
    fields = {**{name: published[name] for name in published.keys() - {"block_ff_dim"}}, "intermediate_size": 10_752}
    assert facts_of_spec(parse_model_spec(fields)) == facts_of_transformers(fields)
