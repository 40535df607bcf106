"""Stored weights in words: which bits lie where, that nothing is lost, and that fp8's product is the fp32 one.

Products are in tests/kernels/test_grouped_linear_on_hopper.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.grouped_linear import Fp8Experts, StoredExperts, grouped_linear, plan_experts
from kernels.grouped_linear import words as words_module
from kernels.grouped_linear.factors import FACTOR_END, FP8_RAISED, SMALLEST_FACTOR, factors_of
from kernels.grouped_linear.words import (
    BLOCK,
    MAX_EXPONENT,
    ExpertWords,
    Fp8Words,
    Mxfp4Words,
    bytes_of,
    words_of,
)
from tests.examples import thorough
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_grouped_linear_stored import chosen, fp8_experts, mxfp4_experts, seeded, within

pytestmark = pytest.mark.skipif(INTERPRETING, reason="torch alone")

# Of the four values in each half of a word: shifts to the left that take the sign, and exponent with mantissa, to their
# places in bfloat16.
SHIFTS = ((0, 0), (3, 3), (1, -3), (2, 6))
SIGN, NUMBER = 0x8000, 0x01C0
CODES = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


def fp8_of_bf16(experts: int, outputs: int, depth: int) -> Fp8Experts:
    """Its factors are numbers of bfloat16."""
    weight = fp8_experts(experts, outputs, depth)
    return weight._replace(scales=weight.scales.bfloat16().float())


def word_of(words: ExpertWords, row: int, column: int) -> int:
    """Returns the first expert's word at a row and a column of words."""
    width = words.values.shape[-1]
    return int(words.values[0, row // BLOCK, column // width, row % BLOCK, column % width]) & 0xFFFFFFFF


def shifted(half: int, places: int) -> int:
    return half << places if places >= 0 else half >> -places


def bfloat16_of(bits: int) -> float:
    """By hand: where a library has told the processor to flush subnormal numbers, torch would make 0 of them."""
    exponent, fraction = bits >> 7 & 255, (bits & 127) / 128
    size = (1.0 + fraction if exponent else fraction) * 2.0 ** (max(exponent, 1) - 127)
    return -size if bits & SIGN else size


def test_each_value_lies_where_a_shift_makes_it_a_number() -> None:
    """By Python's integers, as the kernel does it: 2**126 times as small, then times a power of two."""
    weight = mxfp4_experts(1, 2, 64, scales=(0, MAX_EXPONENT + 1))
    words = words_of(weight)
    assert isinstance(words, Mxfp4Words)
    for row in range(2):
        for column in range(64):
            block, inner = divmod(column, 32)
            s, h, t, i = inner // 16, inner // 8 % 2, inner // 2 % 4, inner % 2
            half = word_of(words, row, 4 * block + t) >> (16 * i) & 0xFFFF
            sign, number = SHIFTS[2 * s + h]
            bits = shifted(half, sign) & SIGN | shifted(half, number) & NUMBER
            code = weight.values[0, row, column // 2].item() >> (4 * (column % 2)) & 15
            value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7] * (-1.0 if code & 8 else 1.0)
            assert bfloat16_of(bits) * 2.0**126 == value
            assert words.exponents[0, row, 0].item() >> (8 * block) & 255 == weight.scales[0, row, block].item()


def test_each_byte_of_fp8_lies_where_a_mask_or_a_rotation_makes_it_a_number() -> None:
    """2**120 times as small, then times a factor that is as much too large."""
    weight = fp8_of_bf16(1, 130, 272)
    words, codes = words_of(weight), weight.values.view(torch.uint8)[0].tolist()
    assert isinstance(words, Fp8Words) and words.factors.dtype == torch.int32
    for row in range(130):
        for column in range(272):
            group, inner = divmod(column, 16)
            h, t, i = inner // 8, inner // 2 % 4, inner % 2
            word = word_of(words, row, 4 * group + t)
            rotated = word >> 4 | word << 28 & 0xFFFFFFFF
            numbers = word & 0x87F087F0, rotated & 0x87808780 | word << 4 & 0x00700070
            bits = numbers[h] >> (16 * i) & 0xFFFF
            assert bfloat16_of(bits) * FP8_RAISED == weight.values[0, row, column].item()
            assert bits >> 15 == codes[row][column] >> 7
            factor = int(words.factors[0, row // 128, column // 128]) & 0xFFFFFFFF
            assert factor >> 16 == factor & 0xFFFF
            assert bfloat16_of(factor & 0xFFFF) == weight.scales[0, row // 128, column // 128].item() * FP8_RAISED


def weights_by(head: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Returns [factors, codes]: value * head + (value * rest) by exact sums, each rounded once as bfloat16 is."""
    values = CODES.view(torch.float8_e4m3fn).float().double()
    return in_8_bits(values * head[:, None] + in_8_bits(values * rest[:, None]))


def in_8_bits(numbers: torch.Tensor) -> torch.Tensor:
    """By the mantissa as an integer: torch would round to fp32 between."""
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp((mantissa * 256).round(), exponent - 8)


def parts_of(factors: torch.Tensor) -> list[torch.Tensor]:
    """Returns head and rest in fp64."""
    both = [factors, factors >> 32] if factors.dtype == torch.int64 else [factors, torch.zeros_like(factors)]
    assert all((part & 0xFFFF).equal(part >> 16 & 0xFFFF) for part in both)
    return [(part << 16).int().view(torch.float32).double() / FP8_RAISED for part in both]


@pytest.mark.parametrize("of_bf16", [True, False])
def test_factors_make_the_weights_of_every_code(of_bf16: bool) -> None:
    """Of a few thousand factors of every size that is taken: the fp32 product, rounded to bfloat16."""
    exponents = torch.randint(-79, 7, (4000,), generator=seeded(1)).double()
    scales = torch.ldexp(torch.rand(4000, generator=seeded(2)).double() / 2 + 0.5, exponents.int()).float()
    ends = torch.tensor([SMALLEST_FACTOR, FACTOR_END * (1 - 2.0**-8), 1.0, 0.0])
    scales = torch.cat([scales, ends])
    scales = torch.cat([scales, -scales])
    if of_bf16:
        scales = scales.bfloat16().float()
    factors = factors_of(scales)
    assert factors is not None and factors.dtype == (torch.int32 if of_bf16 else torch.int64)
    wanted = CODES.view(torch.float8_e4m3fn).float() * scales[:, None]
    assert weights_by(*parts_of(factors)).equal(wanted.bfloat16().double())


def test_the_nearest_rest_would_make_other_weights() -> None:
    """0.6 % of factors need another one, as the search for it says."""
    scales = torch.rand(4000, generator=seeded(2)) / 2 + 0.5
    head = in_8_bits(scales.double())
    rest = in_8_bits(scales.double() - head)
    wanted = (CODES.view(torch.float8_e4m3fn).float() * scales[:, None]).bfloat16().double()
    is_wrong = (weights_by(head, rest) != wanted).any(1)
    assert 0.002 < is_wrong.double().mean() < 0.02
    factors = factors_of(scales)
    assert factors is not None
    assert weights_by(*parts_of(factors)).equal(wanted)


@pytest.mark.parametrize(
    "first", [thorough(first) if first else first for first in range(0, 1 << 23, 1 << 19)], ids=hex
)
def test_each_mantissa_of_a_factor_has_a_right_rest(first: int) -> None:
    scales = (torch.arange(first, first + (1 << 19), dtype=torch.int32) | 127 << 23).view(torch.float32)
    factors = factors_of(scales)
    assert factors is not None
    mantissas = 1 + torch.arange(8) / 8
    head, rest = parts_of(factors)
    wanted = (mantissas * scales[:, None]).bfloat16().double()
    assert in_8_bits(mantissas * head[:, None] + in_8_bits(mantissas * rest[:, None])).equal(wanted)


@pytest.mark.parametrize("factor", [2.0**-81, FACTOR_END, 2.0**-149, float("inf"), float("nan")])
def test_factors_that_words_do_not_take(factor: float) -> None:
    for signed in (factor, -factor):
        assert factors_of(torch.tensor([1.0, signed, 0.0])) is None


@pytest.mark.parametrize("sizes", [(3, 5, 32), (2, 130, 160), (1, 64, 2880)], ids=str)
@pytest.mark.parametrize("make", [mxfp4_experts, fp8_experts, fp8_of_bf16])
def test_nothing_is_lost(make: Any, sizes: tuple[int, int, int]) -> None:
    weight = make(*sizes)
    words = words_of(weight)
    assert words is not None and words.shape == weight.shape
    back = bytes_of(words)
    assert type(back) is type(weight)
    assert bytes_in(back).equal(bytes_in(weight)) and back.scales.equal(weight.scales)


def bytes_in(weight: StoredExperts) -> torch.Tensor:
    return weight.values.view(torch.uint8)


def test_no_byte_of_fp8_is_lost() -> None:
    """Slices of wider rows and of no whole block, and all codes; factors down to the signs of 0."""
    codes = CODES[torch.arange(3 * 130 * 144) % len(CODES)].view(3, 130, 144)
    scales = fp8_of_bf16(3, 130, 144).scales
    scales[1, 1, 1], scales[2, 0, 0] = -0.0, -SMALLEST_FACTOR
    weight = Fp8Experts(within(codes.view(torch.float8_e4m3fn), "cpu"), within(scales, "cpu"))
    words = words_of(weight)
    assert words is not None
    back = bytes_of(words)
    assert bytes_in(back).equal(codes)
    assert back.scales.view(torch.int32).equal(scales.view(torch.int32))
    x, plan = torch.randn(5, 144, generator=seeded(3)).bfloat16(), plan_experts(chosen(5, 2, 3), 3)
    assert_same_bits(grouped_linear(x, words, plan), grouped_linear(x, weight, plan))


@pytest.mark.parametrize("sizes", [(0, 24, 96), (3, 0, 96), (3, 24, 0)])
def test_no_words_stand_for_nothing(sizes: tuple[int, int, int]) -> None:
    assert words_of(fp8_experts(*sizes)) is None and words_of(mxfp4_experts(*sizes)) is None


def test_what_lies_beyond_the_last_row_or_column_is_zeros() -> None:
    for weight, width in ((fp8_experts(2, 130, 144), 32), (mxfp4_experts(2, 130, 160), 16)):
        words = words_of(weight)
        assert words is not None and words.values.shape == (2, 2, 2, BLOCK, width)
        assert words.values[:, 0, 0].count_nonzero() > 0.9 * 2 * BLOCK * width
        assert not words.values[:, 1, :, 2:].any() and not words.values[:, :, 1, :, width // 4 :].any()


def test_experts_are_put_in_words_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for weight in (fp8_experts(7, 24, 96), mxfp4_experts(7, 24, 96)):
        at_once = words_of(weight)
        assert at_once is not None
        monkeypatch.setattr(words_module, "SLICE_BYTES", 3 * weight.values[0].nbytes)
        few = words_of(weight)
        monkeypatch.undo()
        assert few is not None and few.values.equal(at_once.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [mxfp4_experts, fp8_experts, fp8_of_bf16])
def test_where_no_kernel_reads_words_they_are_multiplied_as_in_the_files(make: Any, dtype: torch.dtype) -> None:
    weight, ids, x = make(3, 24, 96), chosen(5, 2, 3), torch.randn(5, 96, generator=seeded(3)).to(dtype)
    plan = plan_experts(ids, 3)
    words = words_of(weight)
    assert words is not None
    assert_same_bits(grouped_linear(x, words, plan), grouped_linear(x, weight, plan))


def made(weight: StoredExperts) -> Any:
    words = words_of(weight)
    assert words is not None
    return words


WORDS, FP8_WORDS = made(mxfp4_experts(4, 130, 96)), made(fp8_experts(4, 130, 96))
WRONG: list[tuple[ExpertWords, str]] = [
    (WORDS._replace(shape=(3, 130, 96)), r"weight\.shape: must be of 4 experts, got 3"),
    (WORDS._replace(values=WORDS.values[:3]), r"weight\.values: shape must be \[4, 2, 1, 128, 16\]"),
    (WORDS._replace(values=WORDS.values.view(torch.uint8)), r"weight\.values: "),
    (WORDS._replace(exponents=WORDS.exponents[:, :100]), r"weight\.exponents: shape must be \[4, 130, 1\]"),
    (FP8_WORDS._replace(shape=(4, 257, 96)), r"weight\.values: shape must be \[4, 3, 1, 128, 32\]"),
    (FP8_WORDS._replace(values=FP8_WORDS.values.float()), r"weight\.values: dtype must be"),
    (FP8_WORDS._replace(values=FP8_WORDS.values.mT.contiguous().mT), "must be contiguous"),
    (FP8_WORDS._replace(factors=FP8_WORDS.factors[:, :1]), r"weight\.factors: shape must be \[4, 2, 1\]"),
    (FP8_WORDS._replace(factors=FP8_WORDS.factors.double()), r"weight\.factors: dtype must be"),
    (FP8_WORDS._replace(scales=FP8_WORDS.scales.double()), r"weight\.scales: dtype must be"),
]


@pytest.mark.parametrize(("weight", "message"), WRONG)
def test_wrong_words_are_named(weight: ExpertWords, message: str) -> None:
    plan = plan_experts(torch.tensor([[0, 2]] * 6, dtype=torch.int32), 4)
    with pytest.raises(KernelArgumentError, match=message):
        grouped_linear(torch.zeros(6, 96), weight, plan)
