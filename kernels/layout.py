"""How the slots of a page lie in memory.

The writer of a page records its layout; a reader is told it, and never guesses from a shape.

    NHD       K, V [num_pages, page_tokens, heads, dim]
    HND       K, V [num_pages, heads, page_tokens, dim]
    SHUFFLE   K    [num_pages, heads, dim / x, page_tokens, x]
              V    [num_pages, heads, page_tokens / x, dim, x]         x = 16 bytes / itemsize
"""

from enum import Enum
from typing import NamedTuple

import torch

from kernels.errors import KernelArgumentError


class KvLayout(Enum):
    """The order of a page's axes."""

    NHD = "NHD"
    HND = "HND"
    SHUFFLE = "SHUFFLE"


class PageShape(NamedTuple):
    """What a pair of page tensors holds, whatever its layout."""

    num_pages: int
    page_tokens: int
    heads: int
    dim: int


def pack_width(dtype: torch.dtype) -> int:
    """x of the SHUFFLE layout: how many elements fill 16 bytes."""
    return 16 // dtype.itemsize


def page_tensor_shapes(
    shape: PageShape, dtype: torch.dtype, layout: KvLayout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the key pages and of the value pages."""
    pages, tokens, heads, dim = shape
    if layout is KvLayout.NHD:
        return (pages, tokens, heads, dim), (pages, tokens, heads, dim)
    if layout is KvLayout.HND:
        return (pages, heads, tokens, dim), (pages, heads, tokens, dim)
    x = pack_width(dtype)
    if dim % x or tokens % x:
        raise KernelArgumentError(
            f"SHUFFLE packs {x} elements of {dtype}: dim {dim} and page_tokens {tokens} must be multiples"
        )
    return (pages, heads, dim // x, tokens, x), (pages, heads, tokens // x, dim, x)


def page_shape(k_pages: torch.Tensor, layout: KvLayout) -> PageShape:
    """Reads the shape back from the key pages."""
    axes = 5 if layout is KvLayout.SHUFFLE else 4
    if k_pages.dim() != axes:
        raise KernelArgumentError(f"k_pages: {layout.name} has {axes} axes, got shape {tuple(k_pages.shape)}")
    size = k_pages.shape
    if layout is KvLayout.NHD:
        return PageShape(size[0], size[1], size[2], size[3])
    if layout is KvLayout.HND:
        return PageShape(size[0], size[2], size[1], size[3])
    return PageShape(size[0], size[3], size[1], size[2] * size[4])


def keys_to_nhd(k_pages: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Key pages as [num_pages, page_tokens, heads, dim]; a view where the layout allows one."""
    if layout is KvLayout.NHD:
        return k_pages
    if layout is KvLayout.HND:
        return k_pages.transpose(1, 2)
    return k_pages.permute(0, 3, 1, 2, 4).flatten(3)


def values_to_nhd(v_pages: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Value pages as [num_pages, page_tokens, heads, dim]; a view where the layout allows one."""
    if layout is not KvLayout.SHUFFLE:
        return keys_to_nhd(v_pages, layout)
    return v_pages.permute(0, 2, 4, 1, 3).flatten(1, 2)


def write_slots(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    layout: KvLayout,
) -> None:
    """Puts k and v [n, heads, dim] into n slots, by plain indexing; every slot must exist."""
    shape = page_shape(k_pages, layout)
    page, offset = slots // shape.page_tokens, slots % shape.page_tokens
    if layout is not KvLayout.SHUFFLE:
        keys_to_nhd(k_pages, layout)[page, offset] = k
        values_to_nhd(v_pages, layout)[page, offset] = v
        return
    x = pack_width(k_pages.dtype)
    k_pages.permute(0, 3, 1, 2, 4)[page, offset] = k.view(*k.shape[:-1], shape.dim // x, x)
    v_pages.permute(0, 2, 4, 1, 3)[page, offset // x, offset % x] = v


def read_span(
    k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, start: int, stop: int, layout: KvLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [stop - start, heads, dim] at one sequence's positions; `table` is its row of block tables."""
    page_tokens = page_shape(k_pages, layout).page_tokens
    first = start // page_tokens
    ids = table[first : -(-stop // page_tokens)]
    skip = start - first * page_tokens
    keys = keys_to_nhd(k_pages.index_select(0, ids), layout).flatten(0, 1)[skip : skip + stop - start]
    values = values_to_nhd(v_pages.index_select(0, ids), layout).flatten(0, 1)[skip : skip + stop - start]
    return keys, values
