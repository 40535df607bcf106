"""Which path an extend takes: absorbed below a number of new tokens, materialised from there on.

The number is measured: benchmarks/results/mla_extend.json has both paths' times, benchmarks/gpu_mla.py takes them.

Absorbing costs 2 * (576 + 512) operations per head for each pair of a new and a visible token; materialising costs
2 * (192 + 128), and 2 * 512 * 256 per head for each cached token, once. At one and the same rate both would cost the
same at 170 new tokens, whatever the number of heads and of cached tokens; the materialised path's kernels run at a
higher rate, so in fact they meet earlier.
"""

from enum import Enum

__all__ = ["MATERIALISED_FROM", "MlaPath", "choose_path"]

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
