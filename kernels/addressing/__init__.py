"""Where an element lies inside a page and to which sequence a dense row belongs, for kernels of every op.

`triton` holds the jit functions, this module what the launchers pass to them.
"""

from kernels.layout import KvLayout

__all__ = ["PROBES", "layout_index", "search_levels"]

_INDICES = {KvLayout.NHD: 0, KvLayout.HND: 1, KvLayout.SHUFFLE: 2}


def layout_index(layout: KvLayout) -> int:
    """Returns the number that kernels know a layout by."""
    return _INDICES[layout]


# Starts of sequences that a search looks at in one step.
PROBES = 64


def search_levels(num_seqs: int) -> int:
    """How many steps find one of so many sequences."""
    levels = 1
    while num_seqs > PROBES**levels:
        levels += 1
    return levels
