"""Where an element lies inside a page, for kernels of every op.

Knows no page id and no sequence; `kernel` holds the jit functions, this module what the launchers pass to them.
"""

from kernels.layout import KvLayout

__all__ = ["layout_code"]

_CODES = {KvLayout.NHD: 0, KvLayout.HND: 1, KvLayout.SHUFFLE: 2}


def layout_code(layout: KvLayout) -> int:
    """The number that stands for a layout inside a kernel."""
    return _CODES[layout]
