"""Which path an extend takes: absorbed below a number of new tokens, materialised from there on.

Knows only numbers; they are measurements, and benchmarks/gpu_mla.py takes them again.

Absorbing costs 2 * (576 + 512) operations per head for each pair of a new and a visible token; materialising costs
2 * (192 + 128), and 2 * 512 * 256 per head for each cached token, once. What both cost per cached token is equal at
about 170 new tokens, whatever the number of heads and of cached tokens, if both run at the same rate.
"""

from enum import Enum

__all__ = ["MATERIALISED_FROM", "MlaPath", "choose_path"]

MATERIALISED_FROM = 171


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
