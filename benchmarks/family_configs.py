"""The families of models that benchmarks know: configs of published models, whole or cut, and tiny ones to try code."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.grouped_linear import Fp8Experts, Mxfp4Experts
from kernels.grouped_linear.stored import FP8_BLOCK, MX_BLOCK
from tests.worker_service.published_configs import PUBLISHED
from tests.worker_service.published_mamba2 import PUBLISHED_MAMBA2
from worker_service.model.weight_formats import FP8, MXFP4, ExpertFormat

MAX_TOKENS = 65_536 + 512
BF16 = "bf16"
EXPERTS: dict[str, ExpertFormat | None] = {BF16: None, FP8: Fp8Experts, MXFP4: Mxfp4Experts}
# Of a value, its share of a scale among them, in a stored format.
STORED_BYTES = {FP8: 1 + 4 / FP8_BLOCK**2, MXFP4: 0.5 + 1 / MX_BLOCK}
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32_768,
}


class BenchFamily(NamedTuple):
    """A config.json, the format of its experts, and in what its checkpoint has the factors of fp8."""

    fields: dict[str, Any]
    weights: str = BF16
    factors: torch.dtype = torch.float32


def published(name: str, num_layers: int = 0, weights: str = BF16, **others: int) -> BenchFamily:
    """Returns the config.json of a repository; num_layers: with its first layers only, 0: with all."""
    fields = {**(PUBLISHED | PUBLISHED_MAMBA2)[name], **others}
    if num_layers:
        fields["num_hidden_layers"] = num_layers
        fields.pop("layer_types", None)
    return BenchFamily(fields, weights)


# A layer of DeepSeek V3 takes 11.7 GB with experts in fp8, one of V4 Flash 3.7 GB.
FAMILIES: dict[str, BenchFamily] = {
    "experts": published("Qwen/Qwen3-30B-A3B"),
    "experts-fp8": published("Qwen/Qwen3-30B-A3B", weights=FP8)._replace(factors=torch.bfloat16),
    "windows-sinks": published("openai/gpt-oss-20b", weights=MXFP4),
    "two-ropes": BenchFamily(
        {  # Gemma-3-12b
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": 3840,
            "intermediate_size": 15_360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 1024,
        }
    ),
    "latents": published("deepseek-ai/DeepSeek-V3", 8, FP8, first_k_dense_replace=1),
    "short-convs": published("LiquidAI/LFM2-1.2B"),
    "mamba2": published("ibm-fms/Bamba-9B"),
    "gated-delta": published("Qwen/Qwen3-Next-80B-A3B-Instruct", 32),
    "gated-delta-fp8": published("Qwen/Qwen3-Next-80B-A3B-Instruct", weights=FP8)._replace(factors=torch.bfloat16),
    "channel-decays": published("moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    "chosen-latents": published("deepseek-ai/DeepSeek-V3.2-Exp", 8, FP8, first_k_dense_replace=1),
    # Without experts that are chosen by token: the tables of random weights would name none.
    "compressed": published("deepseek-ai/DeepSeek-V4-Flash", 20, MXFP4, num_hash_layers=0),
}
QUICK: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 40,
    "query_pre_attn_scalar": 16,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 512,
}
QUICK_OF: dict[str, dict[str, Any]] = {
    "short-convs": {"full_attn_idxs": [1]},
    "mamba2": {
        "attn_layer_indices": [1],
        "attn_rotary_emb": 16,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
    },
    "channel-decays": {
        "num_expert_group": 1,
        "topk_group": 1,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 16,
            "kda_layers": [1, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "chosen-latents": {"index_head_dim": 16, "index_n_heads": 16, "index_topk": 64},
    "compressed": {
        "compress_ratios": [128, 4, 128],
        "head_dim": 32,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_topk": 16,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 32,
    },
    "gated-delta": {
        "full_attention_interval": 2,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
}
QUICK_OF["gated-delta-fp8"] = QUICK_OF["gated-delta"]


def fields_of(name: str, *, quick: bool) -> dict[str, Any]:
    """Returns a family's config.json; `quick`: with tiny layers."""
    fields = {**FAMILIES[name].fields, **COMMON}
    if quick:
        fields.pop("layer_types", None)
        fields |= QUICK | QUICK_OF.get(name, {})
    return fields
