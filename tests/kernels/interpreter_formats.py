"""Numbers of few bits, which Triton's interpreter keeps as unsigned ones."""

from typing import Any

import numpy as np


def widen_bf16(data: Any) -> Any:
    return (data.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(data: Any) -> Any:
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)


def _e4m3_values() -> Any:
    """What each code means: sign, 4 bits of exponent with bias 7, 3 of mantissa; the last code of a sign is NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[127::128] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


E4M3_VALUES = _e4m3_values()
# Above midpoint i lies code i + 1.
E4M3_MIDPOINTS = (E4M3_VALUES[:126] + E4M3_VALUES[1:127]) / 2


def round_to_e4m3(data: Any) -> Any:
    data = np.ascontiguousarray(data, dtype=np.float32)
    size = np.abs(data)
    below = np.searchsorted(E4M3_MIDPOINTS, size, side="left")
    above = np.searchsorted(E4M3_MIDPOINTS, size, side="right")
    code = np.where(below % 2 == 0, below, above)  # a midpoint goes to the even code of its two
    code = np.where(np.isnan(data), 127, code)
    return (code + 128 * np.signbit(data)).astype(np.uint8)
