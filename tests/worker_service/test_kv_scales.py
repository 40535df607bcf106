"""Scales from weights: the largest key and value that a row can make are just within what a page holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.fp8 import E4M3_MAX
from worker_service.model.attention_specs import AttentionSpec
from worker_service.model.kv_scales import kv_scales
from worker_service.model.layer_weights import AttentionWeights, Linear
from worker_service.model.spec import NormKind, NormSpec

HIDDEN, HEAD = 32, 8
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=HEAD, rope=None, rotary_dim=HEAD)
UNTURNED = torch.tensor([[[1.0], [0.0]]])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def weights(k_norm: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> AttentionWeights:
    qkv = Linear(drawn(8 * HEAD, HIDDEN), bias)
    return AttentionWeights(qkv, Linear(drawn(HIDDEN, 4 * HEAD), None), k_norm, k_norm)


def normed(kind: NormKind, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    centred = row - row.mean() if kind is NormKind.LAYER else row
    factor = weight + 1.0 if kind is NormKind.RMS_PLUS_ONE else weight
    return centred / centred.square().mean().sqrt() * factor


@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.RMS_PLUS_ONE])
def test_the_largest_value_is_within_a_factor_of_two(kind: NormKind) -> None:
    """It is that of the row of weights that is longest, for an input along it."""
    norm, made = drawn(HIDDEN), weights(bias=drawn(8 * HEAD))
    scale = kv_scales(SPEC, made, NormSpec(0.0, kind), norm, UNTURNED).v
    assert scale is not None
    assert made.qkv.bias is not None
    factor = norm + 1.0 if kind is NormKind.RMS_PLUS_ONE else norm
    rows, biases = made.qkv.weight[6 * HEAD :], made.qkv.bias[6 * HEAD :]
    along = [torch.sign(bias) * row * factor for row, bias in zip(rows, biases, strict=True)]
    values = [rows @ normed(kind, row, norm) + biases for row in along]
    largest = torch.stack(values).abs().max()
    assert E4M3_MAX * scale / 2.1 <= largest <= E4M3_MAX * scale


@pytest.mark.parametrize("kind", list(NormKind))
def test_no_key_of_any_row_is_beyond(kind: NormKind) -> None:
    norm, made = drawn(HIDDEN), weights()
    scales = kv_scales(SPEC, made, NormSpec(0.0, kind), norm, UNTURNED)
    rows = torch.stack([normed(kind, row, norm) for row in drawn(500, HIDDEN) * 1e3])
    made_rows = rows @ made.qkv.weight.t()
    for scale, heads in ((scales.k, made_rows[:, 4 * HEAD : 6 * HEAD]), (scales.v, made_rows[:, 6 * HEAD :])):
        assert scale is not None
        assert heads.abs().max() * 2**0.5 <= E4M3_MAX * scale


def test_a_norm_of_the_heads_bounds_the_keys() -> None:
    """Whatever the projection: sqrt(8) x 5, turned by sqrt(2), is 20; a rope of factor 3 makes it 60."""
    made = weights(k_norm=torch.tensor([5.0, *[1.0] * (HEAD - 1)]))
    for factor, bound in ((1.0, 20.0), (3.0, 60.0)):
        scale = kv_scales(SPEC, made, NormSpec(0.0), drawn(HIDDEN), UNTURNED * factor).k
        assert scale is not None
        assert 448 * scale / 2.1 <= bound <= 448 * scale


def test_the_rows_of_an_output_gate_have_no_part() -> None:
    made, norm = weights(bias=drawn(8 * HEAD)), drawn(HIDDEN)
    assert made.qkv.bias is not None
    gate, gate_bias = 1e6 * drawn(4 * HEAD, HIDDEN), 1e6 * drawn(4 * HEAD)
    gated = replace(made, qkv=Linear(torch.cat([made.qkv.weight, gate]), torch.cat([made.qkv.bias, gate_bias])))
    plain, scales = (kv_scales(SPEC, some, NormSpec(0.0), norm, UNTURNED) for some in (made, gated))
    assert plain == scales


def test_weights_of_zero_have_a_scale() -> None:
    zero = AttentionWeights(Linear(torch.zeros(8 * HEAD, HIDDEN), None), Linear(torch.zeros(1, 1), None))
    scale = kv_scales(SPEC, zero, NormSpec(0.0), torch.ones(HIDDEN), UNTURNED).v
    assert scale is not None
    assert scale.item() == 1.0
