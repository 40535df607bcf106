"""What can be trained on the task, by name."""

from __future__ import annotations

from dataclasses import replace

from register_qa.training.hybrid import HybridArchitecture
from register_qa.training.llama import LlamaArchitecture

Architecture = LlamaArchitecture | HybridArchitecture

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
# Two layers of the gated delta rule for each of attention.
HYBRID_4M = HybridArchitecture(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=384,
    attending=(False, False, False, True, False, True),
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=16,
    delta_heads=4,
    delta_k_heads=2,
    delta_dim=64,
    max_positions=4096,
    rope_theta=1e6,
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama-7m": LLAMA_7M,
    "llama-7m-wide": replace(LLAMA_7M, hidden_size=384, intermediate_size=1024, num_layers=4, num_heads=6),
    "llama-tiny": replace(LLAMA_7M, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=2, num_kv_heads=1),
    "hybrid-4m": HYBRID_4M,
}
