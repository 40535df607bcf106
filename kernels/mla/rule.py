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
    Measured(128, 8, 4096, 16, 329, 2207),
    Measured(128, 8, 4096, 64, 1231, 2284),
    Measured(128, 8, 4096, 128, 2468, 2378),
    Measured(128, 8, 4096, 144, 2786, 3068),
    Measured(128, 8, 4096, 192, 3772, 2857),
    Measured(128, 2, 16384, 16, 351, 2280),
    Measured(128, 2, 16384, 64, 1083, 2178),
    Measured(128, 2, 16384, 128, 2158, 2293),
    Measured(128, 2, 16384, 144, 2653, 2630),
    Measured(128, 2, 16384, 192, 3223, 2904),
    Measured(128, 4, 8192, 16, 311, 2281),
    Measured(128, 4, 8192, 64, 1141, 2294),
    Measured(128, 4, 8192, 128, 2225, 2346),
    Measured(128, 4, 8192, 144, 2578, 2698),
    Measured(128, 4, 8192, 192, 3375, 2727),
    Measured(16, 8, 4096, 16, 96, 330),
    Measured(16, 8, 4096, 64, 176, 337),
    Measured(16, 8, 4096, 128, 330, 342),
    Measured(16, 8, 4096, 144, 474, 397),
    Measured(16, 8, 4096, 192, 487, 406),
    Measured(16, 2, 16384, 16, 68, 464),
    Measured(16, 2, 16384, 64, 191, 467),
    Measured(16, 2, 16384, 128, 341, 466),
    Measured(16, 2, 16384, 144, 391, 468),
    Measured(16, 2, 16384, 192, 496, 473),
    Measured(16, 4, 8192, 16, 93, 366),
    Measured(16, 4, 8192, 64, 195, 371),
    Measured(16, 4, 8192, 128, 303, 370),
    Measured(16, 4, 8192, 144, 565, 380),
    Measured(16, 4, 8192, 192, 573, 384),
)

# Up to 128, a whole number of tiles of rows, absorbing costs at most 4% more than materialising; behind it up to 49%.
MATERIALISED_FROM = 129


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
