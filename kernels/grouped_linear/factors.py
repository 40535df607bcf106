"""Factors of stored fp8 as Hopper's kernel takes them: numbers of bfloat16, one or two for each.

A weight is value times factor in fp32, rounded to bfloat16. A factor that is a number of bfloat16 gives it in one
product: 4 bits by 8 are exact in fp32 too. Another one is the sum of two, head and rest, and the weight
value * head + (value * rest), each of the two rounded once. That has 17 of a factor's 24 bits, so a rest is chosen with
which each of the eight mantissas that e4m3 has gives the right weight. A weight of -0 may become +0, which changes no
product: sums begin at +0.
"""

import torch

# The kernel makes values of words that are too small by this factor.
FP8_RAISED = 2.0**120
# From here on no product by a rest is subnormal, and below this all are finite.
SMALLEST_FACTOR, FACTOR_END = 2.0**-80, 2.0**7
MANTISSAS = 8
# By how many units in its last place a rest may be another number than the nearest. Of all 2**23 mantissas of a factor
# 0.58 % need one, 0.005 % two, and none more; exponents change nothing, as no number here is subnormal.
REST_UNITS = (0, 1, -1, 2, -2)


def factors_of(scales: torch.Tensor) -> torch.Tensor | None:
    """Returns the factors of Fp8Words for fp32 scales; None if one is neither 0 nor within the bounds."""
    size = scales.abs()
    if not ((size == 0) | (size >= SMALLEST_FACTOR) & (size < FACTOR_END)).all():
        return None
    whole = scales.double()
    head = _rounded(whole)
    rest = _right_rests(scales, head, _rounded(whole - head))
    if not rest.any():
        return _in_both_halves(head)
    return _in_both_halves(rest).long() << 32 | _in_both_halves(head).long() & 0xFFFFFFFF


def _right_rests(scales: torch.Tensor, head: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """Returns, in fp64, the rest near the nearest one with which each mantissa gives its weight.

    Subnormal numbers of e4m3 have mantissas of these too.
    """
    mantissas = 1 + torch.arange(MANTISSAS, device=scales.device) / MANTISSAS
    wanted = [(mantissa * scales).bfloat16().double() for mantissa in mantissas]
    unit = torch.ldexp((nearest != 0).double(), torch.frexp(nearest).exponent - 8)
    chosen = torch.full_like(head, torch.nan)
    for units in REST_UNITS:
        rest = _rounded(nearest + units * unit)
        right = torch.ones_like(head, dtype=torch.bool)
        for mantissa, weight in zip(mantissas.double(), wanted, strict=True):
            right &= _rounded(mantissa * head + _rounded(mantissa * rest)) == weight
        chosen = torch.where(chosen.isnan() & right, rest, chosen)
        if not chosen.isnan().any():
            break
    return chosen


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Returns fp64 numbers rounded to the eight bits of bfloat16's mantissas, once: torch rounds to fp32 between."""
    bits = numbers.view(torch.int64)
    dropped = 52 - 7
    bits = bits + (1 << dropped - 1) - 1 + (bits >> dropped & 1)
    return (bits & -1 << dropped).view(torch.float64)


def _in_both_halves(numbers: torch.Tensor) -> torch.Tensor:
    """Returns int32: of FP8_RAISED times fp64 numbers of bfloat16, its bits in both halves."""
    bits = (numbers * FP8_RAISED).float().view(torch.int32)
    return bits | bits >> 16 & 0xFFFF
