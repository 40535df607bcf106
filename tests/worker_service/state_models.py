"""Tiny models with recurrent states: what differs from the usual sizes of tests/worker_service/model_kit.py."""

from __future__ import annotations

from typing import Any

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_LFM2 = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": None,
}

_MAMBA = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "pad_token_id": None,
    "num_hidden_layers": 4,
}

_NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 64,
    "pad_token_id": None,
}
_DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "pad_token_id": None,
}
_SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}

_KIMI = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 12,
    "linear_num_heads": 5,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "pad_token_id": None,
}

# By name: (family, fields).
STATE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {**_LFM2, "head_dim": 16, "tie_word_embeddings": True, "block_multiple_of": 32}),
    # Nothing but states: no page is ever written.
    "lfm2-states-alone": ("Lfm2", {**_LFM2, "layer_types": ["conv"] * 3, "num_hidden_layers": 3}),
    "lfm2-biases": (
        "Lfm2",
        {**_LFM2, "head_dim": 16, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    # An odd head size, one group, all biases, steps within limits that cut many of them.
    "bamba-biases": (
        "Bamba",
        {
            **_MAMBA,
            "attn_layer_indices": [2],
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_n_groups": 1,
            "mamba_n_heads": 32,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "num_hidden_layers": 3,
            "time_step_limit": (0.5, 1.5),
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
            "intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    "granite-hybrid-dense-rope": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 80,
            "head_dim": 16,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.3,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.5],
            "mlp_multipliers": [0.7, 0.6],
        },
    ),
    "falcon-h1-norm-first": (
        "FalconH1",
        {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": None, "mamba_rms_norm": True, "projectors_bias": True},
    ),
    "falcon-h1-gate-first": (
        "FalconH1",
        {
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {**_NEMOTRON, "hybrid_override_pattern": "M-M*-M", "mlp_bias": True, "use_bias": True},
    ),
    "nemotron-h-experts": (
        "NemotronH",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "MEM*E",
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron-h-latents": (
        "NemotronH",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "M*E",
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
        },
    ),
    "qwen3-next": ("Qwen3Next", {**_DELTA, **_SHARED}),
    "qwen3-next-sparse": (
        "Qwen3Next",
        {
            **_DELTA,
            **_SHARED,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 6,
            "norm_topk_prob": False,
        },
    ),
    "qwen3.5": ("Qwen3_5", {**_DELTA, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_DELTA, **_SHARED}),
    "kimi-linear": ("KimiLinear", _KIMI),
    # All experts but a few are of groups that are not chosen; queries come from a row; two shared experts.
    "kimi-linear-groups": (
        "KimiLinear",
        {
            **_KIMI,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "q_lora_rank": 20,
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "num_hidden_layers": 3,
        },
    ),
}
