"""A small random model with recurrent states beside attention, as a folder that a worker serves.

Its greedy texts depend on every snapshot that they go on from: tests/e2e/test_states_sabotage.py would fail otherwise.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.e2e.kinds import SIZES, SPREAD
from tests.worker_service.model_kit import config_of, random_reference

# What convolutions add to the hidden state, as a share of what random weights give. Two gates make it so much that
# attention would have no say, and with it all that is more than a few tokens away.
CONVOLUTIONS = 0.03
# The model's own; a snapshot lies at the end of a page.
PAGE = 64
GROUPS = ("full", "state")
FIELDS: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 4,
    "block_auto_adjust_ff_dim": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def make_states(folder: Path, tokenizer: Path, **fields: Any) -> None:
    """Writes the model's folder; the tokenizer is a file of 260 tokens."""
    reference = random_reference(config_of("Lfm2", {**FIELDS, **fields}), seed=5, spread=SPREAD)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("conv.out_proj.weight"):
                parameter.mul_(CONVOLUTIONS)
    reference.save_pretrained(folder)
    shutil.copy(tokenizer, folder)
