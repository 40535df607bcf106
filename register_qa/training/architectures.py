"""What can be trained on the task, by name."""

from __future__ import annotations

from dataclasses import replace

from register_qa.training.llama import LlamaArchitecture

LLAMA_7M = LlamaArchitecture(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=4096,
    rope_theta=1e6,
)
ARCHITECTURES: dict[str, LlamaArchitecture] = {
    "llama-7m": LLAMA_7M,
    "llama-7m-wide": replace(LLAMA_7M, hidden_size=384, intermediate_size=1024, num_layers=4, num_heads=6),
    "llama-tiny": replace(LLAMA_7M, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=2, num_kv_heads=1),
}
