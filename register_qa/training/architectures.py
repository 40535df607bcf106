"""What can be trained on the task, by name.

An architecture builds a model, and returns its config.json. A new kind of layer is a class with the same two methods
and a line in the table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from register_qa.training.llama import LlamaArchitecture
from register_qa.training.trainable import Trainable


class Architecture(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    def build(self) -> Trainable:
        """Fresh weights by torch's present seed."""
        ...

    def config(self, begin: int, end: int) -> dict[str, Any]:
        """config.json's fields, with the tokenizer's begin and end token."""
        ...


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
ARCHITECTURES: dict[str, Architecture] = {
    "llama-7m": LLAMA_7M,
    "llama-7m-wide": replace(LLAMA_7M, hidden_size=384, intermediate_size=1024, num_layers=4, num_heads=6),
    "llama-tiny": replace(LLAMA_7M, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=2, num_kv_heads=1),
}
