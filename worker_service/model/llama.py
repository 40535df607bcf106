"""The Llama family's forward pass, inference only: Llama, Qwen2, Qwen3 and Mistral differ by switches of the config.

Knows no page, batch or request: what attention reads and where K and V go is the caller's `Attend`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from worker_service.model.config import ModelConfig
from worker_service.model.rope import RotaryTable, rotate


class Attend(Protocol):
    """Appends the new K and V of a layer and returns what its queries see: all [num_tokens, heads, head_dim]."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class Linear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; projections that read the same input are one matrix, so one GEMM."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Token ids and positions to hidden states, hidden states to logits.

    Takes the tensors out of the mapping: fusing a layer's projections then never doubles the model's memory.
    """

    def __init__(self, config: ModelConfig, tensors: MutableMapping[str, torch.Tensor], device: torch.device) -> None:
        self.config = config
        self.device = device
        self._embeddings = tensors.pop("model.embed_tokens.weight")
        self._norm = tensors.pop("model.norm.weight")
        self._head = self._embeddings if config.tied_embeddings else tensors.pop("lm_head.weight")
        self._layers = [_layer(tensors, f"model.layers.{layer}") for layer in range(config.num_layers)]
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_model_len, device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embeddings.dtype

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states after the last layer, before the final norm: only the rows that sample need that."""
        cos, sin = self._rotary.at(positions)
        hidden = self._embeddings[token_ids]
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attention(
                number, layer, self._normed(hidden, layer.attention_norm), cos, sin, attend
            )
            hidden = hidden + _mlp(layer, self._normed(hidden, layer.mlp_norm))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [num_rows, vocab_size]."""
        return functional.linear(self._normed(hidden, self._norm), self._head).float()

    def _attention(
        self, number: int, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        config = self.config
        heads = layer.qkv(x).view(x.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        num_qk = config.num_heads + config.num_kv_heads
        q, k, v = heads[:, : config.num_heads], heads[:, config.num_heads : num_qk], heads[:, num_qk:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        attended = attend(number, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return layer.output(attended.reshape(x.shape[0], config.num_heads * config.head_dim))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _mlp(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(functional.silu(gate) * up)


def _layer(tensors: MutableMapping[str, torch.Tensor], prefix: str) -> Layer:
    def linear(*names: str) -> Linear:
        weights = [tensors.pop(f"{prefix}.{name}.weight") for name in names]
        biases = [tensors.pop(f"{prefix}.{name}.bias") for name in names if f"{prefix}.{name}.bias" in tensors]
        return Linear(_stacked(weights), _stacked(biases) if biases else None)

    return Layer(
        attention_norm=tensors.pop(f"{prefix}.input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=tensors.pop(f"{prefix}.self_attn.q_norm.weight", None),
        k_norm=tensors.pop(f"{prefix}.self_attn.k_norm.weight", None),
        output=linear("self_attn.o_proj"),
        mlp_norm=tensors.pop(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
