"""A Llama in plain torch, with gradients: the shape of one, and its forward pass over whole sequences.

Serving the same weights is the worker's job, which reads them by the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from register_qa.training.decoder import Block, Decoder, scores_of_places
from register_qa.training.layers import Mlp, Norm, rotated


@dataclass(frozen=True, slots=True)
class LlamaArchitecture:
    """Sizes of a Llama with tied embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    norm_eps: float = 1e-5

    def build(self) -> Decoder:
        """Fresh weights by torch's present seed."""
        return Decoder(
            self.vocab_size,
            self.hidden_size,
            [_Block(self) for _ in range(self.num_layers)],
            Norm(self.hidden_size, self.norm_eps),
            self.max_positions,
            self.head_dim,
            self.rope_theta,
        )

    def config(self, begin: int, end: int) -> dict[str, Any]:
        """Returns config.json's fields, with the tokenizer's begin and end token."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": begin,
            "eos_token_id": end,
        }


class _Block(Block):
    def __init__(self, shape: LlamaArchitecture) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = hidden + attended
        mixed: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed

    def first_head(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, asking: torch.Tensor
    ) -> torch.Tensor:
        return self.self_attn.first_head(self.input_layernorm(hidden), cos, sin, asking)


class _Attention(nn.Module):
    def __init__(self, shape: LlamaArchitecture) -> None:
        super().__init__()
        self._shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        head_dim = self._shape.head_dim
        q, k, v = (
            projection(x).view(batch, length, -1, head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended: torch.Tensor = self.o_proj(seen.transpose(1, 2).reshape(batch, length, -1))
        return attended

    def first_head(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, asking: torch.Tensor) -> torch.Tensor:
        """What the first query head would look at from some places: scores [batch, places, length], float32."""
        head_dim = self._shape.head_dim
        q = rotated(functional.linear(x, self.q_proj.weight[:head_dim]), cos, sin)
        k = rotated(functional.linear(x, self.k_proj.weight[:head_dim]), cos, sin)
        return scores_of_places(q, k, asking)
