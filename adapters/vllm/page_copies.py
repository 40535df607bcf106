"""Pages between vLLM's KV cache and host memory: a page is its group's layers at one block, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from adapters.vllm.layout import GroupLayout, Layout

# Pages that are gathered on the device at once take this much of its memory.
GATHER_BYTES = 32 << 20


class Event:
    """When some copies have ended. On a CPU they have ended when they return."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = torch.cuda.Event() if stream is not None else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(stream)

    def wait(self) -> None:
        """In the calling thread."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self, stream: torch.cuda.Stream | None) -> None:
        """What is launched on the stream from now on comes later; the caller goes on at once."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class PageCopies:
    """Bytes are uint8 tensors of [pages, page_bytes]."""

    def __init__(self, layout: Layout, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError where vLLM's tensors are not what its specs say."""
        self._layout = layout
        self._layers = [
            [_as_bytes(name, kv_caches, layout.num_blocks) for name in group.layers] for group in layout.groups
        ]
        for group, layers in zip(layout.groups, self._layers, strict=True):
            _check(group, layers)
        self.device = self._layers[0][0].device
        self._save_stream, self._load_stream = _stream(self.device), _stream(self.device)

    def host_buffer(self, group: int, num_pages: int) -> torch.Tensor:
        size = (num_pages, self._layout.groups[group].page_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._save_stream is not None)

    def forward_event(self) -> Event:
        """When what this thread has launched so far has ended."""
        return Event(torch.cuda.current_stream(self.device) if self._save_stream is not None else None)

    def stage(self, group: int, blocks: Sequence[int], after: Event) -> tuple[torch.Tensor, Event]:
        """Begin to copy these blocks to host memory. Returns the bytes, and when they are there."""
        staged = self.host_buffer(group, len(blocks))
        after.hold_back(self._save_stream)
        with _on(self._save_stream):
            for rows in self._slices(group, len(blocks)):
                gathered = self._gather(group, blocks[rows])
                staged[rows].copy_(gathered, non_blocking=True)
        return staged, Event(self._save_stream)

    def place(self, group: int, blocks: Sequence[int], pages: torch.Tensor, after: Event) -> None:
        """Copy these bytes to blocks that nobody uses, behind what `after` stands for. They are there on return."""
        after.hold_back(self._load_stream)
        with _on(self._load_stream):
            for rows in self._slices(group, len(blocks)):
                moved = pages[rows].to(self.device, non_blocking=True)
                index = torch.tensor(blocks[rows], dtype=torch.int64, device=self.device)
                for layer, part in self._parts(group, moved):
                    layer.index_copy_(0, index, part.view(len(index), *layer.shape[1:]))
        Event(self._load_stream).wait()

    def hold_back_forward(self, copies: Sequence[Event]) -> None:
        """What the forward pass launches from now on comes after these copies; so do the loads of this step."""
        for event in copies:
            event.hold_back(torch.cuda.current_stream(self.device) if self._save_stream is not None else None)

    def _gather(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        size = (len(blocks), self._layout.groups[group].page_bytes)
        gathered = torch.empty(size, dtype=torch.uint8, device=self.device)
        for layer, part in self._parts(group, gathered):
            part.copy_(layer.index_select(0, index).reshape(len(blocks), -1))
        return gathered

    def _parts(self, group: int, pages: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer with its bytes of these pages."""
        first = 0
        for layer, size in zip(self._layers[group], self._layout.groups[group].layer_bytes, strict=True):
            part = pages[:, first : first + size]
            yield layer, part
            first += size

    def _slices(self, group: int, num_pages: int) -> Iterator[slice]:
        step = max(1, GATHER_BYTES // self._layout.groups[group].page_bytes)
        for first in range(0, num_pages, step):
            yield slice(first, first + step)


def _as_bytes(name: str, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> torch.Tensor:
    """A layer as [blocks, ..., bytes]; kernels may cut a block in several, which come one after the other."""
    cache = kv_caches.get(name)
    if not isinstance(cache, torch.Tensor):
        raise ValueError(f"layer {name} has no KV cache of its own here")
    if cache.shape[0] % num_blocks or cache.stride(-1) != 1:
        raise ValueError(f"layer {name}: a KV cache of shape {tuple(cache.shape)} cannot be read block by block")
    if cache.shape[0] != num_blocks:
        cache = cache.unflatten(0, (num_blocks, -1))  # type: ignore[no-untyped-call]
    return cache.view(torch.uint8)


def _check(group: GroupLayout, layers: Sequence[torch.Tensor]) -> None:
    for name, size, layer in zip(group.layers, group.layer_bytes, layers, strict=True):
        if layer[0].numel() != size:
            raise ValueError(f"layer {name}: a block has {layer[0].numel()} bytes, its spec says {size}")


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
