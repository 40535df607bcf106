"""The page tensors of one device: K and V of every layer, group by group, and whole pages in and out as bytes.

What each page holds is decided by the cache service.

Beside a CUDA device all layers of the pages are gathered in one launch, and a copy engine carries them over the host
link. A kernel could write to the host directly, nearly as fast, but it occupies multiprocessors meanwhile: attention
that needs all of them took 1.3 to 1.5 times as long beside it, and 1.01 times beside a copy engine.

One group's tensor is [layers of the group, 2 (K, V), num_pages + 1, page_tokens, kv_heads, head_dim]. Page 0 is
reserved: zero from the start, never written, so that a hole in a block table addresses valid memory. A page as bytes is
its rows of all layers in that order: layer 0's K, layer 0's V, layer 1's K, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.copy_pages import pack_pages, unpack_pages
from session.words import GroupKind, GroupSpec
from worker_service.core.errors import PoolError

LAYOUT = "NHD"
# Of a group's tensor; the axes before it, layers and K or V, are what a page gathers its bytes from.
PAGE_AXIS = 2


class KvShape(NamedTuple):
    """Shape of one token's K and V; `windows` holds each layer's sliding window, 0 for full attention."""

    windows: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_tokens: int

    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers with the same window share a group; those with full attention come first."""
        distinct = sorted(set(self.windows))
        return tuple(
            LayerGroup(window, tuple(layer for layer, w in enumerate(self.windows) if w == window))
            for window in distinct
        )

    def row_bytes(self) -> int:
        """Bytes of one page in one layer's K (or V)."""
        return self.page_tokens * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def page_bytes(self, group: LayerGroup) -> int:
        return 2 * len(group.layers) * self.row_bytes()


class LayerGroup(NamedTuple):
    window_tokens: int
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"window{self.window_tokens}" if self.window_tokens else "full"


class LayerPages(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    group: int
    window_tokens: int


class KvPages:
    """Page tensors per group; pages are read and written whole, as bytes in host memory."""

    def __init__(self, shape: KvShape, num_pages: Sequence[int], device: torch.device) -> None:
        groups = shape.groups()
        if len(num_pages) != len(groups) or min(num_pages) < 1:
            raise PoolError(
                f"num_pages: one number of at least 1 for each of {len(groups)} groups, not {list(num_pages)}"
            )
        self.shape = shape
        self.device = device
        self._groups = groups
        self._num_pages = tuple(num_pages)
        self._tensors = tuple(
            _page_tensor(shape, group, count, device) for group, count in zip(groups, num_pages, strict=True)
        )
        self._layers = self._views()
        if device.type == "cuda":
            self._compile_moves()

    def _compile_moves(self) -> None:
        """Moves an empty page of each group once, so that the copy kernels are compiled before serving."""
        for group in range(len(self._groups)):
            self.write_pages(group, [1], self.read_pages(group, [1]))

    def _views(self) -> tuple[LayerPages, ...]:
        views: dict[int, LayerPages] = {}
        for number, (group, tensor) in enumerate(zip(self._groups, self._tensors, strict=True)):
            for place, layer in enumerate(group.layers):
                views[layer] = LayerPages(tensor[place, 0], tensor[place, 1], number, group.window_tokens)
        return tuple(views[layer] for layer in range(len(self.shape.windows)))

    @property
    def page_tokens(self) -> int:
        return self.shape.page_tokens

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def layout_id(self) -> str:
        """What must agree before page bytes may be exchanged between workers; part of the fingerprint."""
        dtype = str(self.shape.dtype).removeprefix("torch.")
        groups = ",".join(f"{group.name}:{'.'.join(map(str, group.layers))}" for group in self._groups)
        heads = f"heads{self.shape.num_kv_heads}x{self.shape.head_dim}"
        return f"v1/{LAYOUT}/{dtype}/page{self.page_tokens}/{heads}/{groups}"

    def specs(self) -> tuple[GroupSpec, ...]:
        return tuple(
            GroupSpec(
                name=group.name,
                kind=GroupKind.WINDOW if group.window_tokens else GroupKind.FULL,
                num_pages=count,
                page_bytes=self.shape.page_bytes(group),
                window_tokens=group.window_tokens,
            )
            for group, count in zip(self._groups, self._num_pages, strict=True)
        )

    def page_bytes(self, group: int) -> int:
        return self.shape.page_bytes(self._groups[group])

    def layer_pages(self, layer: int) -> LayerPages:
        """K and V pages of a layer, [num_pages + 1, page_tokens, kv_heads, head_dim] each."""
        return self._layers[layer]

    def read_pages(self, group: int, page_ids: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the pages' bytes, uint8 [n, page_bytes], in host memory (pinned beside a CUDA device).

        Works on the current stream and waits for it alone, so a mover's thread uses a stream of its own.
        """
        ids = self._checked_ids(group, page_ids)
        host = (
            self.host_buffer(group, len(page_ids)) if out is None else self._checked_buffer(group, len(page_ids), out)
        )
        if self.device.type == "cpu":
            pack_pages(self._tensors[group], ids, host, page_axis=PAGE_AXIS)
            return host
        staged = torch.empty_like(host, device=self.device)
        pack_pages(self._tensors[group], ids, staged, page_axis=PAGE_AXIS)
        host.copy_(staged, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return host

    def write_pages(self, group: int, page_ids: Sequence[int], packed: torch.Tensor) -> None:
        """Writes page bytes (uint8 [n, page_bytes], host memory) into the pages; returns when they are written."""
        ids = self._checked_ids(group, page_ids)
        host = self._checked_buffer(group, len(page_ids), packed)
        unpack_pages(host.to(self.device, non_blocking=True), self._tensors[group], ids, page_axis=PAGE_AXIS)
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def host_buffer(self, group: int, num_pages: int) -> torch.Tensor:
        """Returns an uninitialized buffer, uint8 [num_pages, page_bytes], pinned beside a CUDA device."""
        pin = self.device.type == "cuda"
        return torch.empty((num_pages, self.page_bytes(group)), dtype=torch.uint8, pin_memory=pin)

    def _checked_ids(self, group: int, page_ids: Sequence[int]) -> torch.Tensor:
        for page_id in page_ids:
            if not 1 <= page_id <= self._num_pages[group]:
                raise ValueError(f"page id {page_id} of group {group}: not within 1..{self._num_pages[group]}")
        ids = torch.tensor(list(page_ids), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return ids.to(self.device, non_blocking=True)

    def _checked_buffer(self, group: int, num_pages: int, buffer: torch.Tensor) -> torch.Tensor:
        wanted = (num_pages, self.page_bytes(group))
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != wanted or not buffer.is_contiguous():
            raise ValueError(f"page bytes: contiguous uint8 {wanted} wanted, got {buffer.dtype} {tuple(buffer.shape)}")
        return buffer


def _page_tensor(shape: KvShape, group: LayerGroup, num_pages: int, device: torch.device) -> torch.Tensor:
    sizes = (len(group.layers), 2, num_pages + 1, shape.page_tokens, shape.num_kv_heads, shape.head_dim)
    return torch.zeros(sizes, dtype=shape.dtype, device=device)


def plan_pages(shape: KvShape, budget_bytes: int, max_model_len: int, max_chunk_tokens: int) -> tuple[int, ...]:
    """Returns usable pages per group within the budget. Raises PoolError if one longest prompt does not fit.

    Every group gets the same number, so that a window pool never runs out before the full one.
    """
    groups = shape.groups()
    bytes_per_page = sum(shape.page_bytes(group) for group in groups)
    num_pages = (max(budget_bytes // bytes_per_page - 1, 0),) * len(groups)
    try:
        check_pool(shape, num_pages, max_model_len, max_chunk_tokens)
    except PoolError as error:
        raise PoolError(f"{error}; a page of every group takes {bytes_per_page} of {budget_bytes} bytes") from error
    return num_pages


def check_pool(shape: KvShape, num_pages: Sequence[int], max_model_len: int, max_chunk_tokens: int) -> None:
    """Raises PoolError for pools in which one longest prompt does not fit."""
    for group, count in zip(shape.groups(), num_pages, strict=True):
        needed = longest_prompt_pages(group, shape.page_tokens, max_model_len, max_chunk_tokens)
        if count < needed:
            raise PoolError(
                f"max_model_len: a prompt of {max_model_len} tokens needs {needed} pages of group {group.name}, "
                f"whose pool has {count}"
            )


def longest_prompt_pages(group: LayerGroup, page_tokens: int, max_model_len: int, max_chunk_tokens: int) -> int:
    """Returns pages of one longest prompt.

    Behind a window they are evictable: it needs the window, two chunks, two edges.
    """
    whole = math.ceil(max_model_len / page_tokens)
    if not group.window_tokens:
        return whole
    return min(whole, math.ceil((group.window_tokens + 2 * max_chunk_tokens) / page_tokens) + 2)


def pool_budget(device: torch.device, memory_fraction: float, cpu_bytes: int) -> int:
    """Returns bytes for pages after the weights are loaded: a share of a CUDA device's free memory, or `cpu_bytes`."""
    if device.type != "cuda":
        return cpu_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * memory_fraction)
