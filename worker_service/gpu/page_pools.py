"""The page tensors of one device, group by group, and whole pages in and out as bytes.

What each page holds is decided by the cache service.

Beside a CUDA device all layers of the pages are gathered in one launch, and a copy engine carries them over the host
link. A kernel could write to the host directly, nearly as fast, but it occupies multiprocessors meanwhile: attention
that needs all of them took 1.3 to 1.5 times as long beside it, and 1.01 times beside a copy engine.

A tensor of a group is [layers of the group, planes, num_pages + 1, *page shape]. Page 0 is reserved: zero from the
start, never written, so that a hole in a block table addresses valid memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kernels.copy_pages import pack_pages, unpack_pages
from session.words import GroupSpec
from worker_service.core.errors import PoolError
from worker_service.gpu.group_layout import GroupLayout, PageRole

LAYOUT = "NHD"
# Of a group's tensor; the axes before it, layers and planes, are what a page gathers its bytes from.
PAGE_AXIS = 2
MAX_COMPILED_BYTES = 16 << 20


class LayerPages(NamedTuple):
    """A layer's planes, [num_pages + 1, *page shape] each: of attention K and V, of a recurrence what its state is."""

    planes: tuple[torch.Tensor, ...]
    group: int

    @property
    def k(self) -> torch.Tensor:
        return self.planes[0]

    @property
    def v(self) -> torch.Tensor:
        return self.planes[1]


class PagePools:
    """Page tensors per group; pages are read and written whole, as bytes in host memory."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        num_pages: Sequence[int],
        page_tokens: int,
        device: torch.device,
        state_interval_tokens: int = 0,
    ) -> None:
        if len(num_pages) != len(layouts) or min(num_pages) < 1:
            raise PoolError(
                f"num_pages: one number of at least 1 for each of {len(layouts)} groups, not {list(num_pages)}"
            )
        self.layouts = tuple(layouts)
        self.page_tokens = page_tokens
        self.device = device
        self._num_pages = tuple(num_pages)
        self._state_interval_tokens = state_interval_tokens
        self._tensors = tuple(_tensors(layout, count, device) for layout, count in zip(layouts, num_pages, strict=True))
        self._views = {role: self._views_of(role) for role in PageRole}
        if device.type == "cuda":
            self._compile_moves()

    def _compile_moves(self) -> None:
        """Moves an empty page of each group once, so that the copy kernels are compiled before serving.

        Not of the largest: they move in parts, without a kernel, and their pinned buffer would stay for good.
        """
        for group in range(len(self.layouts)):
            if self.page_bytes(group) <= MAX_COMPILED_BYTES:
                self.write_pages(group, [1], self.read_pages(group, [1]))

    def _views_of(self, role: PageRole) -> dict[int, LayerPages]:
        return {
            layer: LayerPages(tuple(plane for tensor in tensors for plane in tensor[place]), number)
            for number, (layout, tensors) in enumerate(zip(self.layouts, self._tensors, strict=True))
            if layout.use is role
            for place, layer in enumerate(layout.layers)
        }

    @property
    def num_groups(self) -> int:
        return len(self.layouts)

    @property
    def layout_id(self) -> str:
        """Returns what must agree before workers may exchange page bytes; part of the fingerprint."""
        return f"v2/{LAYOUT}/page{self.page_tokens}/{','.join(layout.text for layout in self.layouts)}"

    def specs(self) -> tuple[GroupSpec, ...]:
        interval = self._state_interval_tokens
        return tuple(layout.spec(count, interval) for layout, count in zip(self.layouts, self._num_pages, strict=True))

    def page_bytes(self, group: int) -> int:
        return self.layouts[group].page_bytes

    def layer_pages(self, layer: int) -> LayerPages:
        """Returns the pages of a layer with attention."""
        return self._views[PageRole.KEYS][layer]

    def layer_entries(self, layer: int) -> LayerPages:
        """Returns the pages of a layer's compressed entries."""
        return self._views[PageRole.ENTRIES][layer]

    def layer_raw(self, layer: int) -> LayerPages:
        """Returns the pages of what a layer's compressor makes entries of."""
        return self._views[PageRole.RAW][layer]

    def layer_states(self, layer: int) -> LayerPages:
        """Returns the slots of a layer with a state; one with attention besides has pages too."""
        return self._views[PageRole.STATE][layer]

    def planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Returns all that a layer has, its pages' planes first."""
        return tuple(
            plane for views in self._views.values() for plane in (views[layer].planes if layer in views else ())
        )

    def read_pages(self, group: int, page_ids: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the pages' bytes, uint8 [n, page_bytes], in host memory (pinned beside a CUDA device).

        Works on the current stream and waits for it alone, so a mover's thread uses a stream of its own.
        """
        ids = self._checked_ids(group, page_ids)
        host = (
            self.host_buffer(group, len(page_ids)) if out is None else self._checked_buffer(group, len(page_ids), out)
        )
        staged = host if self.device.type == "cpu" else torch.empty_like(host, device=self.device)
        for tensor, rows in self._parts(group, staged):
            packed = rows if rows.is_contiguous() else torch.empty_like(rows, memory_format=torch.contiguous_format)
            pack_pages(tensor, ids, packed, page_axis=PAGE_AXIS)
            if packed is not rows:
                rows.copy_(packed)
        if staged is not host:
            host.copy_(staged, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
        return host

    def write_pages(self, group: int, page_ids: Sequence[int], packed: torch.Tensor) -> None:
        """Writes page bytes (uint8 [n, page_bytes], host memory) into the pages; returns when they are written."""
        ids = self._checked_ids(group, page_ids)
        host = self._checked_buffer(group, len(page_ids), packed)
        for tensor, rows in self._parts(group, host.to(self.device, non_blocking=True)):
            unpack_pages(rows.contiguous(), tensor, ids, page_axis=PAGE_AXIS)
        self._synchronize()

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Returns an uninitialized buffer, uint8 [num_bytes], pinned beside a CUDA device."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def read_part(self, group: int, page_id: int, first_byte: int, out: torch.Tensor) -> None:
        """Fills `out`, a buffer of host_bytes, with a page's bytes from `first_byte` on.

        No more than these are staged on the device either. Works on the current stream, as read_pages does.
        """
        for held, place in self._held_bytes(group, page_id, first_byte, out.numel()):
            out[place].view(held.shape).copy_(held, non_blocking=True)
        self._synchronize()

    def write_part(self, group: int, page_id: int, first_byte: int, data: torch.Tensor) -> None:
        """Writes `data`, uint8 in host memory, into a page's bytes from `first_byte` on; returns when it is written."""
        for held, place in self._held_bytes(group, page_id, first_byte, data.numel()):
            held.copy_(data[place].view(held.shape), non_blocking=True)
        self._synchronize()

    def _held_bytes(
        self, group: int, page_id: int, first_byte: int, num_bytes: int
    ) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yields the memory of some of a page's bytes, uint8 [n] or [planes, n], each with its place among them."""
        self._check_ids(group, [page_id])
        if not 0 <= first_byte < first_byte + num_bytes <= self.page_bytes(group):
            raise ValueError(f"bytes {first_byte} to {first_byte + num_bytes}: not within a page of group {group}")
        start = 0
        for tensor in self._tensors[group]:
            planes = tensor.view(torch.uint8).view(-1, self._num_pages[group] + 1, tensor[0, 0, 0].nbytes)[:, page_id]
            first, end = max(first_byte - start, 0), min(first_byte + num_bytes - start, planes.numel())
            for held, at in _cut_planes(planes, first, end):
                place = start + at - first_byte
                yield held, slice(place, place + held.numel())
            start += planes.numel()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def host_buffer(self, group: int, num_pages: int) -> torch.Tensor:
        """Returns an uninitialized buffer, uint8 [num_pages, page_bytes], pinned beside a CUDA device."""
        pin = self.device.type == "cuda"
        return torch.empty((num_pages, self.page_bytes(group)), dtype=torch.uint8, pin_memory=pin)

    def _parts(self, group: int, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each tensor of the group with its columns of the page rows."""
        layout = self.layouts[group]
        sizes = [len(layout.layers) * tensor.layer_bytes for tensor in layout.tensors]
        return list(zip(self._tensors[group], torch.split(rows, sizes, dim=1), strict=True))

    def _check_ids(self, group: int, page_ids: Sequence[int]) -> None:
        for page_id in page_ids:
            if not 1 <= page_id <= self._num_pages[group]:
                raise ValueError(f"page id {page_id} of group {group}: not within 1..{self._num_pages[group]}")

    def _checked_ids(self, group: int, page_ids: Sequence[int]) -> torch.Tensor:
        self._check_ids(group, page_ids)
        ids = torch.tensor(list(page_ids), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return ids.to(self.device, non_blocking=True)

    def _checked_buffer(self, group: int, num_pages: int, buffer: torch.Tensor) -> torch.Tensor:
        wanted = (num_pages, self.page_bytes(group))
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != wanted or not buffer.is_contiguous():
            raise ValueError(f"page bytes: contiguous uint8 {wanted} wanted, got {buffer.dtype} {tuple(buffer.shape)}")
        return buffer


def _tensors(layout: GroupLayout, num_pages: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros(
            (len(layout.layers), tensor.planes, num_pages + 1, *tensor.page_shape), dtype=tensor.dtype, device=device
        )
        for tensor in layout.tensors
    )


def _cut_planes(planes: torch.Tensor, first: int, end: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields views of the bytes [first, end) of [planes, n], whole rows as one view, each with its first byte."""
    while first < end:
        row, column = divmod(first, planes.shape[1])
        num_rows = (end - first) // planes.shape[1]
        is_whole = not column and num_rows
        held = planes[row : row + num_rows] if is_whole else planes[row, column : column + end - first]
        yield held, first
        first += held.numel()
