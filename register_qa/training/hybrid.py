"""The gated delta rule in most layers, gated attention in the others, with gradients: a small Qwen3.5 in plain torch.

Serving the same weights is the worker's job, which reads them by the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from register_qa.training.decoder import Block, Decoder, scores_of_places
from register_qa.training.delta_scan import gated_delta
from register_qa.training.layers import Mlp, Norm, rotated

# Of first steps' sizes and of rates: heads begin with memories of a token up to a thousand tokens.
STEP_SIZES = (1e-3, 1e-1)
RATES = (1.0, 16.0)
UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class HybridArchitecture:
    """Sizes of a Qwen3.5 with tied embeddings.

    attending   whether a layer has attention, for each layer; that above the first half must have
    rotary_dim  elements of an attention's head that are turned
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attending: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    delta_heads: int
    delta_k_heads: int
    delta_dim: int
    max_positions: int
    rope_theta: float
    width: int = 4
    norm_eps: float = 1e-6

    def build(self) -> Decoder:
        """Fresh weights by torch's present seed."""
        return Decoder(
            self.vocab_size,
            self.hidden_size,
            [_AttentionBlock(self) if attends else _DeltaBlock(self) for attends in self.attending],
            Norm(self.hidden_size, self.norm_eps, plus_one=True),
            self.max_positions,
            self.rotary_dim,
            self.rope_theta,
        )

    def config(self, begin: int, end: int) -> dict[str, Any]:
        """Returns config.json's fields, with the tokenizer's begin and end token."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.attending),
            "layer_types": ["full_attention" if attends else "linear_attention" for attends in self.attending],
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "attn_output_gate": True,
            "linear_conv_kernel_dim": self.width,
            "linear_key_head_dim": self.delta_dim,
            "linear_value_head_dim": self.delta_dim,
            "linear_num_key_heads": self.delta_k_heads,
            "linear_num_value_heads": self.delta_heads,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": begin,
            "eos_token_id": end,
        }


class _HybridBlock(Block):
    def __init__(self, shape: HybridArchitecture) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps, plus_one=True)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps, plus_one=True)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def _behind_mixer(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed


class _AttentionBlock(_HybridBlock):
    def __init__(self, shape: HybridArchitecture) -> None:
        super().__init__(shape)
        self.self_attn = _GatedAttention(shape)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.self_attn(self.input_layernorm(hidden), cos, sin)
        return self._behind_mixer(hidden + attended)

    def first_head(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, asking: torch.Tensor
    ) -> torch.Tensor:
        return self.self_attn.first_head(self.input_layernorm(hidden), cos, sin, asking)


class _DeltaBlock(_HybridBlock):
    def __init__(self, shape: HybridArchitecture) -> None:
        super().__init__(shape)
        self.linear_attn = _GatedDelta(shape)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        del cos, sin
        remembered: torch.Tensor = self.linear_attn(self.input_layernorm(hidden))
        return self._behind_mixer(hidden + remembered)

    def first_head(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, asking: torch.Tensor
    ) -> torch.Tensor:
        raise TypeError("attending: the layer above the first half must have attention")


class _GatedAttention(nn.Module):
    """Queries and keys are normed, the output goes through a sigmoid; a head's query and gate lie together."""

    def __init__(self, shape: HybridArchitecture) -> None:
        super().__init__()
        self._head_dim = head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * shape.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head_dim, shape.hidden_size, bias=False)
        self.q_norm = Norm(head_dim, shape.norm_eps, plus_one=True)
        self.k_norm = Norm(head_dim, shape.norm_eps, plus_one=True)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * self._head_dim).chunk(2, dim=-1)
        k, v = (projection(x).view(batch, length, -1, self._head_dim) for projection in (self.k_proj, self.v_proj))
        q, k = (rotated(normed.transpose(1, 2), cos, sin) for normed in (self.q_norm(q), self.k_norm(k)))
        seen = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        attended: torch.Tensor = self.o_proj((seen.transpose(1, 2) * torch.sigmoid(gate)).flatten(2))
        return attended

    def first_head(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, asking: torch.Tensor) -> torch.Tensor:
        """What the first query head would look at from some places: scores [batch, places, length], float32."""
        q = self.q_norm(functional.linear(x, self.q_proj.weight[: self._head_dim]))
        k = self.k_norm(functional.linear(x, self.k_proj.weight[: self._head_dim]))
        return scores_of_places(rotated(q, cos, sin), rotated(k, cos, sin), asking)


class _GatedDelta(nn.Module):
    """The rule behind a causal convolution of queries, keys and values; each head's output is normed, then gated."""

    def __init__(self, shape: HybridArchitecture) -> None:
        super().__init__()
        self._shape = shape
        hidden, heads, values = shape.hidden_size, shape.delta_heads, shape.delta_heads * shape.delta_dim
        channels = 2 * shape.delta_k_heads * shape.delta_dim + values
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*RATES).log())
        sizes = torch.empty(heads).uniform_(*map(math.log, STEP_SIZES)).exp()
        # What softplus takes to these sizes.
        self.dt_bias = nn.Parameter(sizes + torch.log(-torch.expm1(-sizes)))
        self.norm = Norm(shape.delta_dim, shape.norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, (batch, length, _) = self._shape, x.shape
        keys, values = shape.delta_k_heads * shape.delta_dim, shape.delta_heads * shape.delta_dim
        mixed = functional.silu(self._convolved(self.in_proj_qkv(x)))
        q, k, v = (
            part.float().view(batch, length, -1, shape.delta_dim).transpose(1, 2)
            for part in mixed.split_with_sizes([keys, keys, values], dim=-1)
        )
        q, k = (_unit(rows).repeat_interleave(shape.delta_heads // shape.delta_k_heads, dim=1) for rows in (q, k))
        steps = functional.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        g = (-self.A_log.float().exp() * steps).transpose(1, 2)
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        remembered = gated_delta(q * shape.delta_dim**-0.5, k, v, g, beta).transpose(1, 2)
        gate = self.in_proj_z(x).float().view(remembered.shape)
        gated = (self.norm(remembered) * functional.silu(gate)).to(x.dtype)
        out: torch.Tensor = self.out_proj(gated.flatten(2))
        return out

    def _convolved(self, columns: torch.Tensor) -> torch.Tensor:
        """A sum of shifted products: a grouped convolution's backward pass is slow, and this one fuses."""
        width, length = self._shape.width, columns.shape[1]
        padded, taps = functional.pad(columns, (0, 0, width - 1, 0)), self.conv1d.weight[:, 0].to(columns.dtype)
        parts = [padded[:, tap : tap + length] * taps[:, tap] for tap in range(width)]
        return torch.stack(parts).sum(0)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + UNIT_EPS)
