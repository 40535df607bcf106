"""grouped_linear with weights as checkpoints store them: the bits of the product with what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.grouped_linear import (
    TILE_ROWS,
    Fp8Experts,
    Mxfp4Experts,
    StoredExperts,
    dequantised,
    grouped_linear,
    packed_experts,
    plan_experts,
)
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ODD, WHOLE = (130, 200), (64, 320)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fp8_experts(experts: int, outputs: int, depth: int, seed: int = 1) -> Fp8Experts:
    """Every code that is a number, and factors that are no powers of two."""
    codes = torch.randint(0, 256, (experts, outputs, depth), dtype=torch.uint8, generator=seeded(seed))
    codes = codes.where(codes & 127 != 127, codes - 1)
    blocks = (experts, -(-outputs // 128), -(-depth // 128))
    return Fp8Experts(codes.view(torch.float8_e4m3fn), torch.rand(blocks, generator=seeded(seed + 1)) / 100 + 1e-4)


def mxfp4_experts(
    experts: int, outputs: int, depth: int, seed: int = 1, scales: tuple[int, int] = (112, 128)
) -> Mxfp4Experts:
    values = torch.randint(0, 256, (experts, outputs, depth // 2), dtype=torch.uint8, generator=seeded(seed))
    exponents = torch.randint(*scales, (experts, outputs, depth // 32), dtype=torch.uint8, generator=seeded(seed + 1))
    return Mxfp4Experts(values, exponents)


def moved(weight: StoredExperts, device: str) -> StoredExperts:
    return type(weight)(*(part.to(device) for part in weight))


def chosen(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    chance = torch.arange(1.0, experts + 1).expand(tokens, -1)
    return chance.multinomial(top_k, generator=seeded(5)).int()


def products(
    weight: torch.Tensor | StoredExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    target: Target,
    rows: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    device = target.device
    plan = plan_experts(ids.to(device), weight.shape[0], tile_rows=rows, backend=target.backend)
    on_device = weight.to(device) if isinstance(weight, torch.Tensor) else moved(weight, device)
    bias = None if bias is None else bias.to(device)
    return grouped_linear(x.to(device), on_device, plan, bias, backend=target.backend)


def assert_as_dequantised(
    weight: StoredExperts, dtype: torch.dtype, target: Target, rows: int | None, *, has_bias: bool, tokens: int = 21
) -> None:
    experts, outputs, depth = weight.shape
    ids, x = chosen(tokens, 2, experts), torch.randn(tokens, depth, generator=seeded(3)).to(dtype)
    bias = torch.randn(experts, outputs, generator=seeded(4)).to(dtype) if has_bias else None
    got = products(weight, x, ids, target, rows, bias)
    assert got.isfinite().all() and got.dtype is dtype
    assert_same_bits(got, products(dequantised(weight, dtype), x, ids, target, rows, bias))


@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [ODD, WHOLE], ids=str)
def test_fp8_gives_the_bits_of_its_values(
    target: Target, sizes: tuple[int, int], dtype: torch.dtype, rows: int
) -> None:
    assert_as_dequantised(fp8_experts(4, *sizes), dtype, target, rows, has_bias=sizes == ODD)


@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(130, 224), WHOLE], ids=str)
def test_mxfp4_gives_the_bits_of_its_values(
    target: Target, sizes: tuple[int, int], dtype: torch.dtype, rows: int
) -> None:
    assert_as_dequantised(mxfp4_experts(4, *sizes), dtype, target, rows, has_bias=sizes != WHOLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [fp8_experts, mxfp4_experts], ids=["fp8", "mxfp4"])
def test_a_row_has_its_own_bits(target: Target, make: Any, dtype: torch.dtype) -> None:
    """In tiles of every size, alone and among others."""
    weight, ids = make(5, 70, 160), chosen(70, 3, 5)
    x = torch.randn(70, 160, generator=seeded(3)).to(dtype)
    together = products(weight, x, ids, target, 16).view(70, 3, -1)
    for rows in TILE_ROWS[1:]:
        assert_same_bits(products(weight, x, ids, target, rows).view(70, 3, -1), together)
    for first, count in ((0, 1), (40, 1), (7, 20)):
        some = slice(first, first + count)
        assert_same_bits(products(weight, x[some], ids[some], target), together[some].flatten(0, 1))


def within(part: torch.Tensor, device: str) -> torch.Tensor:
    """Returns the same on a device, as a slice of a tensor that holds more rows and columns."""
    experts, rows, columns = part.shape
    wide = torch.full((experts, rows + 24, columns + 32), 255).to(torch.uint8).to(device)
    wide = wide.view(part.dtype) if part.element_size() == 1 else wide.to(part.dtype)
    wide[:, 8 : rows + 8, 16 : columns + 16] = part.to(device)
    return wide[:, 8 : rows + 8, 16 : columns + 16]


@pytest.mark.parametrize("weight", [fp8_experts(3, 256, 96), mxfp4_experts(3, 256, 96)], ids=["fp8", "mxfp4"])
def test_weights_that_are_slices(target: Target, weight: StoredExperts) -> None:
    ids, x = chosen(9, 2, 3), torch.randn(9, 96, generator=seeded(3)).bfloat16()
    parts = type(weight)(*(within(part, target.device) for part in weight))
    plan = plan_experts(ids.to(target.device), 3, backend=target.backend)
    got = grouped_linear(x.to(target.device), parts, plan, backend=target.backend)
    assert_same_bits(got, products(weight, x, ids, target))


def test_every_exponent_of_mxfp4(target: Target) -> None:
    """Subnormal weights and such that are infinite in fp16, but none whose sums are: one column is not 0."""
    depth, experts = 32, 1
    for dtype, highest in ((torch.bfloat16, 252), (torch.float16, 140)):
        codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(highest)
        values = torch.zeros(experts, len(codes), depth // 2, dtype=torch.uint8)
        values[0, :, 3] = codes << 4
        scales = torch.arange(highest, dtype=torch.uint8).repeat(16)[None, :, None]
        weight = Mxfp4Experts(values, scales.contiguous())
        x = torch.zeros(1, depth, dtype=dtype)
        x[0, 7] = 1.0
        got = products(weight, x, torch.zeros(1, 1, dtype=torch.int32), target)
        assert_same_bits(got[0] + 0.0, dequantised(weight, dtype)[0, :, 7].to(target.device) + 0.0)


@pytest.mark.skipif(INTERPRETING, reason="a CPU's own route")
@pytest.mark.parametrize("weight", [fp8_experts(3, 24, 96), mxfp4_experts(3, 24, 96)], ids=["fp8", "mxfp4"])
def test_fp32_takes_the_reference(weight: StoredExperts) -> None:
    ids, x = chosen(5, 2, 3), torch.randn(5, 96, generator=seeded(3))
    plan = plan_experts(ids, 3)
    assert packed_experts(weight) is weight
    got = grouped_linear(x, weight, plan)
    assert_same_bits(got, grouped_linear(x, dequantised(weight, torch.float32), plan, backend=Backend.REFERENCE))


@pytest.mark.skipif(INTERPRETING, reason="torch alone")
def test_what_fp8_stands_for() -> None:
    """Against Python's own floats: a product of 4 and 24 bits is exact in them."""
    weight = fp8_experts(2, 130, 200)
    wanted = torch.empty(weight.shape, dtype=torch.float64)
    for expert in range(2):
        for row in range(130):
            for column in range(200):
                factor = weight.scales[expert, row // 128, column // 128].item()
                wanted[expert, row, column] = weight.values[expert, row, column].item() * factor
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same_bits(dequantised(weight, dtype), wanted.float().to(dtype))


@pytest.mark.skipif(INTERPRETING, reason="torch alone")
def test_what_mxfp4_stands_for() -> None:
    weight = mxfp4_experts(2, 3, 64, scales=(0, 255))
    wanted = torch.empty(weight.shape)
    for expert in range(2):
        for row in range(3):
            for column in range(64):
                code = weight.values[expert, row, column // 2].item() >> (4 * (column % 2)) & 15
                value = E2M1[code & 7] * (-1.0 if code & 8 else 1.0)
                wanted[expert, row, column] = value * 2.0 ** (weight.scales[expert, row, column // 32].item() - 127)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same_bits(dequantised(weight, dtype), wanted.to(dtype))


FP8, MXFP4 = fp8_experts(4, 130, 96), mxfp4_experts(4, 130, 96)
IDS = torch.tensor([[0, 2]] * 6, dtype=torch.int32)
WRONG: list[tuple[StoredExperts, str]] = [
    (FP8._replace(values=FP8.values[:3]), r"weight\.values: shape must be \[4, any, any\]"),
    (FP8._replace(values=FP8.values.view(torch.uint8)), r"weight\.values: dtype must be one of"),
    (FP8._replace(scales=FP8.scales[:, :1]), r"weight\.scales: shape must be \[4, 2, 1\], got \[4, 1, 1\]"),
    (FP8._replace(scales=FP8.scales.bfloat16()), r"weight\.scales: dtype must be one of"),
    (FP8._replace(values=fp8_experts(4, 96, 130).values.mT), r"weight\.values: the last axis must have stride 1"),
    (MXFP4._replace(values=MXFP4.values[:, :, :40]), r"weight\.values: rows must be whole blocks of 32, got 80 values"),
    (MXFP4._replace(scales=MXFP4.scales[:, :, :2]), r"weight\.scales: shape must be \[4, 130, 3\], got \[4, 130, 2\]"),
    (MXFP4._replace(scales=MXFP4.scales.view(torch.int8)), r"weight\.scales: dtype must be one of"),
    (MXFP4._replace(values=MXFP4.values[:, :, :32]), r"weight\.scales: shape must be \[4, 130, 2\]"),
]


@pytest.mark.parametrize(("weight", "message"), WRONG)
def test_wrong_weights_are_named(weight: StoredExperts, message: str) -> None:
    plan = plan_experts(IDS, 4, backend=Backend.REFERENCE)
    with pytest.raises(KernelArgumentError, match=message):
        grouped_linear(torch.zeros(6, 96), weight, plan)


def test_wrong_rows_are_named() -> None:
    plan = plan_experts(IDS, 4, backend=Backend.REFERENCE)
    with pytest.raises(KernelArgumentError, match=r"x: shape must be \[any, 96\], got \[6, 64\]"):
        grouped_linear(torch.zeros(6, 64), MXFP4, plan)


@pytest.mark.skipif(not INTERPRETING, reason="no kernel runs here")
def test_kernels_refuse_fp32() -> None:
    plan = plan_experts(IDS, 4, backend=Backend.REFERENCE)
    with pytest.raises(KernelArgumentError, match="x: must be bf16 or fp16"):
        grouped_linear(torch.zeros(6, 96), FP8, plan, backend=Backend.TRITON)
