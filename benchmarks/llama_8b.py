"""Random weights in the shape of Llama-3-8B on a CUDA device, with pages and a runner; benchmarks share it."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.paged_model import PagedModel
from worker_service.model.runner import RunnerLimits

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


class Llama8B(PagedModel):
    def __init__(
        self,
        num_pages: int,
        limits: RunnerLimits,
        device: torch.device,
        num_layers: int = 32,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        fields = {**FIELDS, "num_hidden_layers": num_layers}
        super().__init__(fields, num_pages, limits, device, kv_dtype=kv_dtype)
