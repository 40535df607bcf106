"""Scales of fp8 pages, from a layer's weights alone: no key or value can exceed 448 times its scale.

The input of a projection is a normed row times the norm's weight, and a normed row is at most sqrt(hidden_size) long.
By the Cauchy-Schwarz inequality an element of the output is at most

    sqrt(hidden_size) * |weight row * norm weight| + |bias|

and a key behind a norm of its head at most sqrt(head_dim) times the norm's weight. A rotation mixes two elements, which
makes the larger one up to sqrt(2) times larger.

The bound is some sqrt(hidden_size) times a usual value. That costs no accuracy: e4m3 has all its mantissa bits in 15
powers of two, so with 4,096 hidden elements a value of usual size is still 300 times the least that has them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernels.fp8 import E4M3_MAX
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.layer_weights import AttentionWeights
from worker_service.model.norms import stored_norm
from worker_service.model.spec import NormSpec

# Room for roundings to 16 bits on the way to a key: input, projection, norm and rotation, 2^-8 each at the most.
ROUNDING = 1.0 + 2.0**-5
MOST_EXPONENT = 100


class KvScales(NamedTuple):
    """fp32 [1] each; None: the pages need none."""

    k: torch.Tensor | None
    v: torch.Tensor | None


NO_SCALES = KvScales(None, None)


def kv_scales(
    spec: AttentionSpec,
    weights: AttentionWeights,
    norm: NormSpec,
    input_norm: torch.Tensor,
    cos_sin: torch.Tensor,
) -> KvScales:
    """Returns the scales of a layer's keys and values, powers of two: these round nothing.

    `input_norm` is the weight of the norm before the projections, as the checkpoint has it.
    """
    rows = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    # Behind them may be the rows of an output gate.
    weight, bias = (None if tensor is None else tensor[: sum(rows)] for tensor in weights.qkv)
    assert weight is not None
    _, k, v = torch.split(weight, rows)
    _, k_bias, v_bias = (None,) * 3 if bias is None else torch.split(bias, rows)
    multiplier = stored_norm(norm, input_norm)
    if weights.k_norm is None:
        key = _projected(k, multiplier, k_bias)
    else:
        key = math.sqrt(spec.head_dim) * stored_norm(norm, weights.k_norm).abs().max().item()
    # At position 0 the cosine is 1 times the rope's own factor.
    turned = max(1.0, math.sqrt(2.0) * cos_sin[0, 0].max().item())
    device = weights.qkv.weight.device
    return KvScales(_scale(key * turned, device), _scale(_projected(v, multiplier, v_bias), device))


def _projected(weight: torch.Tensor, multiplier: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The most that an element of the projection can be. In fp64: no order of the sum decides on a power of two."""
    lengths = torch.linalg.vector_norm(weight.double() * multiplier.double(), dim=1)
    largest = math.sqrt(weight.shape[1]) * lengths
    return float((largest if bias is None else largest + bias.double().abs()).max().item())


def _scale(bound: float, device: torch.device) -> torch.Tensor:
    """The least power of two that is not below bound / 448, but for powers of two themselves."""
    exponent = math.frexp(bound * ROUNDING / E4M3_MAX)[1]
    return torch.tensor([2.0 ** max(-MOST_EXPONENT, min(exponent, MOST_EXPONENT))], device=device)
