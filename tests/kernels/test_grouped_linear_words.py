"""mxfp4 weights in words: which bits lie where, and that nothing is lost.

Products are in tests/kernels/test_grouped_linear_on_hopper.py.
"""

from __future__ import annotations

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.grouped_linear import Mxfp4Words, grouped_linear, plan_experts
from kernels.grouped_linear.words import MAX_EXPONENT, bytes_of, words_of
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_grouped_linear_stored import chosen, mxfp4_experts, seeded

pytestmark = pytest.mark.skipif(INTERPRETING, reason="torch alone")

# Of the four values in each half of a word: shifts to the left that take the sign, and exponent with mantissa, to their
# places in bfloat16.
SHIFTS = ((0, 0), (3, 3), (1, -3), (2, 6))
SIGN, NUMBER = 0x8000, 0x01C0


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
    words, wanted = words_of(weight), bytes_of(words_of(weight))
    assert wanted.values.equal(weight.values)
    for row in range(2):
        for column in range(64):
            block, inner = divmod(column, 32)
            s, h, t, i = inner // 16, inner // 8 % 2, inner // 2 % 4, inner % 2
            half = words.values[0, row, 4 * block + t].item() >> (16 * i) & 0xFFFF
            sign, number = SHIFTS[2 * s + h]
            bits = shifted(half, sign) & SIGN | shifted(half, number) & NUMBER
            code = weight.values[0, row, column // 2].item() >> (4 * (column % 2)) & 15
            value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7] * (-1.0 if code & 8 else 1.0)
            assert bfloat16_of(bits) * 2.0**126 == value
            assert words.exponents[0, row, 0].item() >> (8 * block) & 255 == weight.scales[0, row, block].item()


@pytest.mark.parametrize("sizes", [(3, 5, 32), (2, 130, 160), (1, 64, 2880)], ids=str)
def test_nothing_is_lost(sizes: tuple[int, int, int]) -> None:
    weight = mxfp4_experts(*sizes)
    words = words_of(weight)
    assert words.shape == weight.shape
    back = bytes_of(words)
    assert back.values.equal(weight.values) and back.scales.equal(weight.scales)
    assert words.values.nbytes == weight.values.nbytes


def test_where_no_kernel_reads_words_they_are_multiplied_as_in_the_files() -> None:
    weight, ids, x = mxfp4_experts(3, 24, 96), chosen(5, 2, 3), torch.randn(5, 96, generator=seeded(3)).bfloat16()
    plan = plan_experts(ids, 3)
    assert_same_bits(grouped_linear(x, words_of(weight), plan), grouped_linear(x, weight, plan))


WORDS = words_of(mxfp4_experts(4, 130, 96))
WRONG: list[tuple[Mxfp4Words, str]] = [
    (WORDS._replace(values=WORDS.values[:3]), r"weight\.values: shape must be \[4, any, any\]"),
    (WORDS._replace(values=WORDS.values.view(torch.uint8)), r"weight\.values: dtype must be"),
    (WORDS._replace(exponents=WORDS.exponents[:, :100]), r"weight\.exponents: shape must be \[4, 130, 1\]"),
]


@pytest.mark.parametrize(("weight", "message"), WRONG)
def test_wrong_words_are_named(weight: Mxfp4Words, message: str) -> None:
    plan = plan_experts(torch.tensor([[0, 2]] * 6, dtype=torch.int32), 4)
    with pytest.raises(KernelArgumentError, match=message):
        grouped_linear(torch.zeros(6, 96), weight, plan)
