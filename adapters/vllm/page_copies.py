"""Pages between vLLM's KV cache and host memory: a page is its group's layers at one block, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from adapters.vllm.layout import GroupLayout, Layout

# Pages that are gathered on the device at once take this much of its memory.
GATHER_BYTES = 32 << 20


class Event:
    """Marks the end of some copies. On a CPU they have ended when they return."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = torch.cuda.Event() if stream is not None else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(stream)

    def wait(self) -> None:
        """Waits in the calling thread."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self, stream: torch.cuda.Stream | None) -> None:
        """Makes what is launched on the stream from now on wait; the caller goes on at once."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class PageCopies:
    """Bytes are uint8 tensors of [pages, page_bytes]."""

    def __init__(self, layout: Layout, kv_caches: Mapping[str, Any]) -> None:
        """Raises ValueError where vLLM's tensors are not what its specs say."""
        self._layout = layout
        self._tensors = [_tensors(group, kv_caches, layout.num_blocks) for group in layout.groups]
        self.device = self._tensors[0][0].device
        self._save_stream, self._load_stream = _stream(self.device), _stream(self.device)

    def host_buffer(self, group: int, num_pages: int) -> torch.Tensor:
        size = (num_pages, self._layout.groups[group].page_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._save_stream is not None)

    def forward_event(self) -> Event:
        """Returns an event that ends with what this thread has launched so far."""
        return Event(torch.cuda.current_stream(self.device) if self._save_stream is not None else None)

    def stage(self, group: int, blocks: Sequence[int], after: Event) -> tuple[torch.Tensor, Event]:
        """Begins to copy these blocks to host memory. Returns the bytes, and the event of their arrival."""
        staged = self.host_buffer(group, len(blocks))
        after.hold_back(self._save_stream)
        with _on(self._save_stream):
            for rows in self._slices(group, len(blocks)):
                gathered = self._gather(group, blocks[rows])
                staged[rows].copy_(gathered, non_blocking=True)
        return staged, Event(self._save_stream)

    def place(self, group: int, blocks: Sequence[int], pages: torch.Tensor, after: Event) -> None:
        """Copies these bytes to blocks that are not in use, after the event `after`. They are there on return."""
        after.hold_back(self._load_stream)
        with _on(self._load_stream):
            for rows in self._slices(group, len(blocks)):
                moved = pages[rows].to(self.device, non_blocking=True)
                index = torch.tensor(blocks[rows], dtype=torch.int64, device=self.device)
                for tensor, part in self._parts(group, moved):
                    tensor.index_copy_(0, index, part.view(len(index), *tensor.shape[1:]))
        Event(self._load_stream).wait()

    def hold_back_forward(self, copies: Sequence[Event]) -> None:
        """Makes the forward pass, and the loads of this step, wait for these copies."""
        for event in copies:
            event.hold_back(torch.cuda.current_stream(self.device) if self._save_stream is not None else None)

    def _gather(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        size = (len(blocks), self._layout.groups[group].page_bytes)
        gathered = torch.empty(size, dtype=torch.uint8, device=self.device)
        for tensor, part in self._parts(group, gathered):
            part.copy_(tensor.index_select(0, index).reshape(len(blocks), -1))
        return gathered

    def _parts(self, group: int, pages: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each tensor with its bytes of these pages."""
        first = 0
        for tensor in self._tensors[group]:
            size = tensor[0].numel()
            yield tensor, pages[:, first : first + size]
            first += size

    def _slices(self, group: int, num_pages: int) -> Iterator[slice]:
        step = max(1, GATHER_BYTES // self._layout.groups[group].page_bytes)
        for first in range(0, num_pages, step):
            yield slice(first, first + step)


def _tensors(group: GroupLayout, kv_caches: Mapping[str, Any], num_blocks: int) -> list[torch.Tensor]:
    """Returns a group's tensors as bytes, layer by layer; recurrent states are several tensors in a layer."""
    found = []
    for name, size in zip(group.layers, group.layer_bytes, strict=True):
        cache = kv_caches.get(name)
        tensors = [_as_bytes(name, one, num_blocks) for one in (cache if isinstance(cache, list | tuple) else [cache])]
        num_bytes = sum(tensor[0].numel() for tensor in tensors)
        if num_bytes != size:
            raise ValueError(f"layer {name}: a block has {num_bytes} bytes, its spec says {size}")
        found += tensors
    return found


def _as_bytes(name: str, cache: Any, num_blocks: int) -> torch.Tensor:
    """Returns a tensor as [blocks, ..., bytes]; kernels may cut a block in several, which come one after the other."""
    if not isinstance(cache, torch.Tensor):
        raise ValueError(f"layer {name} has no KV cache of its own here")
    if cache.shape[0] % num_blocks or cache.stride(-1) != 1:
        raise ValueError(f"layer {name}: a KV cache of shape {tuple(cache.shape)} cannot be read block by block")
    if cache.shape[0] != num_blocks:
        return cache.unflatten(0, (num_blocks, -1)).view(torch.uint8)  # type: ignore[no-untyped-call, no-any-return]
    return cache.view(torch.uint8)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
