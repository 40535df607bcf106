"""Small random models, one for each kind of layers, as folders that a worker serves.

Their greedy texts depend on every page of the prompt: tests/e2e/test_kinds_sabotage.py would fail otherwise.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from tests.worker_service.model_kit import config_of, random_reference

WINDOW = 40
PAGE = 16
# The tokenizer has a token for each byte, and four special ones.
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Where all layers see everything: a token takes a CPU half as long, and with two the text depends on every page, too.
# With a window, one layer of them alone reads too few keys of its first page to move it.
FEW_LAYERS = {"num_hidden_layers": 2}
# With 0.2, half of the answers of gpt-oss' kind are a few tokens in turn.
SPREAD = 0.3


class Kind(NamedTuple):
    """transformers' class names begin with `family`; `groups` are the names of the pages that its layers share."""

    family: str
    groups: tuple[str, ...]
    fields: dict[str, Any]
    spread: float = SPREAD
    page: int = PAGE


KINDS = {
    "gpt-oss": Kind(
        "GptOss",
        ("full", f"window{WINDOW}"),
        {
            "sliding_window": WINDOW,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    # Two layers with the window, one that sees everything, and so on: each kind with a rope of its own.
    "gemma3": Kind(
        "Gemma3",
        ("full", f"window{WINDOW}"),
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3-moe": Kind(
        "Qwen3Moe",
        ("full",),
        {
            **FEW_LAYERS,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v3": Kind(
        "DeepseekV3",
        ("full",),
        {
            **FEW_LAYERS,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
}

# Sparse attention: of a prompt's tokens each query sees fewer than two pages hold.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 24}
KINDS["deepseek-v32"] = Kind("DeepseekV32", ("full",), {**KINDS["deepseek-v3"].fields, **_INDEXER})

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

# A window, and entries of 4 and of 128 tokens: a page has whole blocks of both.
KINDS["deepseek-v4"] = Kind(
    "DeepseekV4",
    ("entries4", "entries128", "window1", "window8", "window128"),
    {
        **_EXPERTS,
        **_INDEXER,
        "head_dim": 32,
        "q_lora_rank": 32,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.25,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    page=128,
)

_LATENTS = {**KINDS["deepseek-v3"].fields, "n_shared_experts": 1}

# More families, in tests/e2e/test_families.py: what their layers need is one of the kinds, or nearly.
FAMILIES = {
    "mixtral": Kind(
        "Mixtral", ("full",), {**FEW_LAYERS, "sliding_window": None, "num_local_experts": 6, "num_experts_per_tok": 2}
    ),
    "glm4-moe": Kind(
        "Glm4Moe",
        ("full",),
        {
            **FEW_LAYERS,
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        spread=0.6,
    ),
    "gemma2": Kind("Gemma2", ("full", f"window{WINDOW}"), {"sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    # One full layer alone would hardly move the text: without positions it takes the mean of what it sees.
    "cohere2": Kind(
        "Cohere2",
        ("full", f"window{WINDOW}"),
        {
            "sliding_window": WINDOW,
            "logit_scale": 0.25,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        },
    ),
    # Keys longer than values, and other numbers of heads behind the window.
    "mimo-v2": Kind(
        "MiMoV2Flash",
        ("full", f"window{WINDOW}"),
        {
            **_EXPERTS,
            "sliding_window": WINDOW,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
        spread=0.4,
    ),
    "deepseek-v2": Kind("DeepseekV2", ("full",), {**_LATENTS, "topk_method": "group_limited_greedy"}),
    # Layers that take the choice of the one before have no index keys, so pages of their own.
    "glm-dsa": Kind(
        "GlmMoeDsa",
        ("full-40", "full-40+16"),
        {**_LATENTS, **_INDEXER, "indexer_types": ["full", "shared"]},
    ),
    "glm4-lite": Kind("Glm4MoeLite", ("full",), {**_LATENTS, "n_group": 1, "topk_group": 1}),
}


def make_kind(name: str, folder: Path, tokenizer: Path) -> None:
    """Write the model's folder; the tokenizer is a file of 260 tokens."""
    write_kind((KINDS | FAMILIES)[name], folder, tokenizer)


def write_kind(kind: Kind, folder: Path, tokenizer: Path) -> None:
    """Writes the folder of a kind that has no name here."""
    config = config_of(kind.family, {**SIZES, **kind.fields})
    random_reference(config, seed=5, spread=kind.spread).save_pretrained(folder)
    shutil.copy(tokenizer, folder)
