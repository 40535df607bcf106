"""config.json of DeepSeek V4, as in published_configs.py: as public projects quote the files, never compared with the
files on the hub."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 129280,
}

# The last ratio is that of the layer that predicts ahead.
PUBLISHED_V4: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V4-Flash": {
        **_COMMON,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "hidden_size": 4096,
        "index_topk": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_attention_heads": 64,
        "num_hidden_layers": 43,
        "o_groups": 8,
        "q_lora_rank": 1024,
        "routed_scaling_factor": 1.5,
    },
    "deepseek-ai/DeepSeek-V4-Pro": {
        **_COMMON,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
        "hidden_size": 7168,
        "index_topk": 1024,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "o_groups": 16,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
    },
}
