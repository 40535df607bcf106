"""Small random models with recurrent states beside attention, as folders that a worker serves.

Their greedy texts depend on every snapshot that they go on from, or tests/e2e/test_states_sabotage.py would fail.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.e2e.kinds import SIZES, SPREAD
from tests.worker_service.model_kit import config_of, random_reference

# The models' own; a snapshot lies at the end of a page.
PAGE = 64
GROUPS = ("full", "state")


class Recurrent(NamedTuple):
    """A family's model; `shares` are factors of random weights whose names end so."""

    family: str
    fields: dict[str, Any]
    shares: dict[str, float]


_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
# Of these one layer of each kind: a token takes a CPU half as long.
_FEW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 64}
MODELS = {
    "lfm2": Recurrent(
        "Lfm2",
        {
            "head_dim": None,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        # Two gates make what convolutions add so much that attention would have no say, and with it all that is more
        # than a few tokens away.
        {"conv.out_proj.weight": 0.03},
    ),
    "qwen3-next": Recurrent("Qwen3Next", {**_LINEAR, **_EXPERTS, **_FEW}, {}),
    "qwen3.5": Recurrent("Qwen3_5", _LINEAR, {}),
    "qwen3.5-moe": Recurrent("Qwen3_5Moe", {**_LINEAR, **_EXPERTS, **_FEW}, {}),
    "bamba": Recurrent("Bamba", {**_MAMBA, "head_dim": None, "attn_layer_indices": [1, 3]}, {}),
    "granite-hybrid": Recurrent(
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "head_dim": None,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.7,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
        {},
    ),
    "falcon-h1": Recurrent(
        "FalconH1",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 96,
            "attention_out_multiplier": 12.0,
            "ssm_out_multiplier": 0.1,
        },
        {},
    ),
    "nemotron-h": Recurrent(
        "NemotronH",
        {
            "num_hidden_layers": None,
            "hybrid_override_pattern": "M*-M*E",
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 64,
            "n_routed_experts": 6,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
        {},
    ),
    "kimi-linear": Recurrent(
        "KimiLinear",
        {
            **_FEW,
            "head_dim": None,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        {},
    ),
}


def make_states(folder: Path, tokenizer: Path, name: str = "lfm2", **fields: Any) -> None:
    """Writes the model's folder; the tokenizer is a file of 260 tokens."""
    family, usual, shares = MODELS[name]
    given = {**SIZES, **usual, **fields}
    said = {field: value for field, value in given.items() if value is not None or field.endswith("_token_id")}
    reference = random_reference(config_of(family, said), seed=5, spread=SPREAD)
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            for end, share in shares.items():
                if parameter_name.endswith(end):
                    parameter.mul_(share)
    reference.save_pretrained(folder)
    shutil.copy(tokenizer, folder)
