"""A Llama in plain torch, with gradients: the shape of one, and its forward pass over whole sequences.

Serving the same weights is the worker's job, which reads them by the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

INIT_STD = 0.02


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

    def build(self) -> Llama:
        """Fresh weights by torch's present seed."""
        return Llama(self)

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


class Inside(NamedTuple):
    """What guidance looks at.

    `middle` is the hidden states half-way up, [batch, length, hidden_size]; `pointing` the scores of one head above,
    from the places asked for to every place of the sequence: [batch, places, length], float32, later places -inf.
    """

    logits: torch.Tensor
    middle: torch.Tensor
    pointing: torch.Tensor


class Llama(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab_size]; its `state_dict` has Hugging Face's names."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: LlamaArchitecture) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)
        cos, sin = _rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(_initialise)
        for name, weight in self.named_parameters():
            # What writes to the residual stream starts small, so that depth does not make it grow.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=INIT_STD / (2 * shape.num_layers) ** 0.5)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers: compiled one by one, and their matrices learn by Muon."""
        return self.model.layers

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._logits_and_middle(token_ids)[0]

    def inside(self, token_ids: torch.Tensor, asking: torch.Tensor) -> Inside:
        """The forward pass, and what guidance needs of it; `asking` is places in the sequences, [batch, places]."""
        logits, middle = self._logits_and_middle(token_ids)
        block = self.model.layers[self._num_lower()]
        assert isinstance(block, _Block)
        x = block.input_layernorm(middle)
        length = token_ids.shape[1]
        return Inside(logits, middle, block.self_attn.first_head(x, self.cos[:length], self.sin[:length], asking))

    def _num_lower(self) -> int:
        return (len(self.model.layers) + 1) // 2

    def _logits_and_middle(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = token_ids.shape[1]
        hidden = self.model.embed_tokens(token_ids)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        cos, sin = self.cos[:length], self.sin[:length]
        middle = hidden
        for number, block in enumerate(self.model.layers, start=1):
            hidden = block(hidden, cos, sin)
            if number == self._num_lower():
                middle = hidden
        return functional.linear(self.model.norm(hidden), self.model.embed_tokens.weight), middle


class _Body(nn.Module):
    def __init__(self, shape: LlamaArchitecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.num_layers))
        self.norm = _Norm(shape)


class _Block(nn.Module):
    def __init__(self, shape: LlamaArchitecture) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape)
        self.mlp = _Mlp(shape)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.self_attn(self.input_layernorm(hidden), cos, sin)
        hidden = hidden + attended
        mixed: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed


class _Norm(nn.Module):
    def __init__(self, shape: LlamaArchitecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self._eps = shape.norm_eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (normed * self.weight.float()).to(hidden.dtype)


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
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended: torch.Tensor = self.o_proj(seen.transpose(1, 2).reshape(batch, length, -1))
        return attended

    def first_head(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, asking: torch.Tensor) -> torch.Tensor:
        """What the first query head would look at from some places: scores [batch, places, length], float32."""
        head_dim = self._shape.head_dim
        q = _rotated(functional.linear(x, self.q_proj.weight[:head_dim]), cos, sin)
        k = _rotated(functional.linear(x, self.k_proj.weight[:head_dim]), cos, sin)
        q = q.gather(1, asking.unsqueeze(-1).expand(-1, -1, head_dim))
        scores = (q @ k.transpose(1, 2)).float() * head_dim**-0.5
        later = torch.arange(x.shape[1], device=x.device) > asking.unsqueeze(-1)
        masked: torch.Tensor = scores.masked_fill(later, -torch.inf)
        return masked


class _Mlp(nn.Module):
    def __init__(self, shape: LlamaArchitecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return inner


def _rotary_table(shape: LlamaArchitecture) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [max_positions, head_dim / 2] each, float32."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-exponents)
    return angles.cos(), angles.sin()


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first half of a head is turned against the second, as Hugging Face's Llama does."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
