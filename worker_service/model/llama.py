"""The Llama family's forward pass, inference only: Llama, Qwen2, Qwen3 and Mistral differ by switches of the config.

What attention reads and where K and V go is the caller's `Attend`, the matrix
products are its `Gemm`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from kernels.backend import Backend
from kernels.linear import packed_weight
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from worker_service.model.config import ModelConfig
from worker_service.model.rope import RotaryTable


class Linear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


class Heads(NamedTuple):
    """A layer's heads as its GEMM made them, [num_tokens, q_heads + 2 kv_heads, head_dim], and how to rotate them."""

    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


class Attend(Protocol):
    """Rotates a layer's heads, appends K and V, and returns the attention output: [num_tokens, q_heads, head_dim]."""

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor: ...


class Gemm(Protocol):
    """x [num_rows, K] through a projection: [num_rows, N]."""

    def __call__(self, x: torch.Tensor, linear: Linear, /) -> torch.Tensor: ...


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

    def __init__(
        self,
        config: ModelConfig,
        tensors: MutableMapping[str, torch.Tensor],
        device: torch.device,
        backend: Backend = Backend.AUTO,
    ) -> None:
        self.config = config
        self.device = device
        self.backend = backend
        self._embeddings = tensors.pop("model.embed_tokens.weight")
        self._norm = tensors.pop("model.norm.weight")
        head = self._embeddings if config.tied_embeddings else tensors.pop("lm_head.weight")
        # Tied and packed, the matrix is there twice: rows of embeddings are read from the plain one.
        self._head = Linear(packed_weight(head, backend), None)
        self._layers = [_layer(tensors, f"model.layers.{layer}", backend) for layer in range(config.num_layers)]
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_model_len, device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embeddings.dtype

    def linears(self) -> list[Linear]:
        """Every projection, the head last."""
        projections = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self._layers]
        return [*chain.from_iterable(projections), self._head]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, gemm: Gemm) -> torch.Tensor:
        """Hidden states behind the final norm. Each sum with the residual is one launch with the norm after it."""
        eps, backend = self.config.norm_eps, self.backend
        hidden = self._embeddings[token_ids]
        x = rms_norm(hidden, self._layers[0].attention_norm, eps, backend=backend)
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._norm]
        for number, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = attend(number, self._heads(layer, gemm(x, layer.qkv), positions))
            attended = gemm(attended.view(x.shape[0], -1), layer.output)
            x, hidden = rms_norm(attended, layer.mlp_norm, eps, residual=hidden, backend=backend)
            inner = gemm(silu_mul(gemm(x, layer.gate_up), backend=backend), layer.down)
            x, hidden = rms_norm(inner, next_norm, eps, residual=hidden, backend=backend)
        return x

    def logits(self, normed: torch.Tensor, gemm: Gemm) -> torch.Tensor:
        """[num_rows, vocab_size] in the model's dtype."""
        return gemm(normed, self._head)

    def _heads(self, layer: Layer, qkv: torch.Tensor, positions: torch.Tensor) -> Heads:
        config = self.config
        heads = qkv.view(qkv.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        return Heads(heads, positions, self._rotary.cos_sin, layer.q_norm, layer.k_norm, config.norm_eps)


def _layer(tensors: MutableMapping[str, torch.Tensor], prefix: str, backend: Backend) -> Layer:
    def linear(*names: str) -> Linear:
        weights = [tensors.pop(f"{prefix}.{name}.weight") for name in names]
        biases = [tensors.pop(f"{prefix}.{name}.bias") for name in names if f"{prefix}.{name}.bias" in tensors]
        return Linear(packed_weight(_stacked(weights), backend), _stacked(biases) if biases else None)

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
