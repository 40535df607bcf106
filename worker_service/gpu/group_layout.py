"""What the pages of a group of layers hold: one or more tensors, of any shape and dtype.

A page as bytes is, tensor after tensor, its rows of all layers: layer 0's planes, layer 1's planes, ... With keys and
values as the planes: layer 0's K, layer 0's V, layer 1's K, ...
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import torch

from session.words import GroupKind, GroupSpec

# Codes of element types in a page's header; never reused.
DTYPE_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float8_e4m3fn: 4}
MIXED_DTYPES = 255


class PageTensor(NamedTuple):
    """What each layer of a group has in each page: `planes` arrays of `page_shape`."""

    planes: int
    page_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Returns the bytes of one page in one layer."""
        return self.planes * math.prod(self.page_shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        sizes = "x".join(map(str, (self.planes, *self.page_shape)))
        return f"{sizes}.{str(self.dtype).removeprefix('torch.')}"


class PageRole(Enum):
    """What pages are to a layer, which may be in a group of each role.

    KEYS      what attention reads of each token
    STATE     a recurrence's states
    ENTRIES   one for several tokens: what a compressor made of them
    RAW       what a compressor makes entries of
    """

    KEYS = "keys"
    STATE = "state"
    ENTRIES = "entries"
    RAW = "raw"


class GroupLayout(NamedTuple):
    """Layers whose pages are kept and freed together. A page of a STATE group is a whole state, a slot."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    tensors: tuple[PageTensor, ...]
    window_tokens: int = 0
    role: PageRole = PageRole.KEYS

    @property
    def use(self) -> PageRole:
        return PageRole.STATE if self.kind is GroupKind.STATE else self.role

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * sum(tensor.layer_bytes for tensor in self.tensors)

    @property
    def dtype_code(self) -> int:
        """Returns the code of the group's dtypes, for the headers of its pages."""
        first, *others = {tensor.dtype for tensor in self.tensors}
        return MIXED_DTYPES if others else DTYPE_CODES[first]

    @property
    def text(self) -> str:
        """Returns all that two workers must agree on to exchange this group's pages."""
        tensors = "+".join(tensor.text for tensor in self.tensors)
        return f"{self.name}:{'.'.join(map(str, self.layers))}:{tensors}"

    def spec(self, num_pages: int, state_interval_tokens: int = 0) -> GroupSpec:
        """Returns what the cache service is told; `state_interval_tokens` is for groups of states."""
        return GroupSpec(
            name=self.name,
            kind=self.kind,
            num_pages=num_pages,
            page_bytes=self.page_bytes,
            window_tokens=self.window_tokens,
            state_interval_tokens=state_interval_tokens if self.kind is GroupKind.STATE else 0,
        )
