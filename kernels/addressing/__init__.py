"""Where an element lies inside a page and to which sequence a dense row belongs, for kernels of every op.

`triton` holds the jit functions, this module what the launchers pass to them.
"""

import torch

from kernels.layout import KvLayout, PageShape, pack_width

__all__ = ["PROBES", "layout_index", "page_constants", "row_strides", "search_levels"]

_INDICES = {KvLayout.NHD: 0, KvLayout.HND: 1, KvLayout.SHUFFLE: 2}


def layout_index(layout: KvLayout) -> int:
    """Returns the number that kernels know a layout by."""
    return _INDICES[layout]


def page_constants(shape: PageShape, layout: KvLayout, dtype: torch.dtype) -> dict[str, int]:
    """Returns what a kernel knows of pages when it is compiled; `dtype` is theirs."""
    index = layout_index(layout)
    return {"HEADS": shape.heads, "D": shape.dim, "PAGE": shape.page_tokens, "X": pack_width(dtype), "LAYOUT": index}


def row_strides(k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> tuple[int, ...]:
    """Returns strides of dense rows by token and head, keys' before values', then those of both pools by page."""
    return (*k.stride()[:2], *v.stride()[:2], k_pages.stride(0), v_pages.stride(0))


# Starts of sequences that a search looks at in one step.
PROBES = 64


def search_levels(num_seqs: int) -> int:
    """Returns the steps of a search over `num_seqs` sequences that looks at PROBES of them in each step."""
    levels = 1
    while num_seqs > PROBES**levels:
        levels += 1
    return levels
