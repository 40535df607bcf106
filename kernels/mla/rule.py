"""Which path an extend takes: absorbed below a number of new tokens, materialised from there on.

Knows only numbers; they are measurements, and benchmarks/gpu_mla.py takes them again.

Absorbing costs 2 * (576 + 512) operations per head for each pair of a new and a visible token; materialising costs
2 * (192 + 128), and 2 * 512 * 256 per head for each cached token, once. At one and the same rate both would cost the
same at 170 new tokens, whatever the number of heads and of cached tokens; the materialised path's kernels run at a
higher rate, so in fact they meet earlier.
"""

from enum import Enum
from typing import NamedTuple

__all__ = ["MATERIALISED_FROM", "MEASURED", "Measured", "MlaPath", "choose_path"]


class Measured(NamedTuple):
    """One layer's attention on an H200 in bf16, pages of 64: microseconds of both paths."""

    heads: int
    sequences: int
    cached: int
    new: int
    absorbed: int
    materialised: int


MEASURED = (
    Measured(128, 8, 4096, 16, 345, 2201),
    Measured(128, 8, 4096, 64, 1268, 2271),
    Measured(128, 8, 4096, 128, 2660, 2340),
    Measured(128, 8, 4096, 192, 4036, 2847),
    Measured(128, 2, 16384, 16, 422, 2229),
    Measured(128, 2, 16384, 64, 1186, 2224),
    Measured(128, 2, 16384, 128, 2299, 2208),
    Measured(128, 2, 16384, 192, 3380, 2659),
    Measured(16, 8, 4096, 16, 145, 392),
    Measured(16, 8, 4096, 64, 242, 361),
    Measured(16, 8, 4096, 128, 468, 366),
    Measured(16, 8, 4096, 192, 699, 410),
    Measured(16, 2, 16384, 16, 78, 467),
    Measured(16, 2, 16384, 64, 232, 469),
    Measured(16, 2, 16384, 128, 430, 469),
    Measured(16, 2, 16384, 192, 629, 474),
)

# Straight lines between the measurements cross at 113, 123, 98 and 141 new tokens.
MATERIALISED_FROM = 116


class MlaPath(Enum):
    """AUTO decides sequence by sequence, by its new tokens alone; the other two fix the path, and with it the bits."""

    AUTO = "auto"
    ABSORBED = "absorbed"
    MATERIALISED = "materialised"


def choose_path(new_tokens: int, path: MlaPath = MlaPath.AUTO) -> MlaPath:
    """The path of a sequence with this many new tokens."""
    if path is not MlaPath.AUTO:
        return path
    return MlaPath.MATERIALISED if new_tokens >= MATERIALISED_FROM else MlaPath.ABSORBED
