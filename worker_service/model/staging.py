"""Copies host arrays to the device and results back: one copy each way per launch, through pinned memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

HostArray: TypeAlias = "array[int] | array[float]"

_DTYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32}
_ALIGNMENT = 16
_SMALLEST_BYTES = 1 << 16


class Upload:
    """Packs arrays into one buffer that crosses in one copy; its tensors are views that live until the next `send`."""

    def __init__(self, device: torch.device, num_bytes: int = _SMALLEST_BYTES) -> None:
        """Up to `num_bytes` the buffer does not move, so that tensors of an equal layout keep their addresses."""
        self._device = device
        self._copied = _event(device)
        self._make_buffers(num_bytes)

    def send(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        offsets, end = _layout(arrays)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still be queued behind a launch that was not waited for
        if end > self._host.numel():
            self._make_buffers(1 << (end - 1).bit_length())
        for values, offset in zip(arrays, offsets, strict=True):
            raw = memoryview(values).cast("B")
            self._bytes[offset : offset + len(raw)] = raw
        if self._on_device is not self._host:
            self._on_device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return [self._view(values, offset) for values, offset in zip(arrays, offsets, strict=True)]

    def _view(self, values: HostArray, offset: int) -> torch.Tensor:
        num_bytes = len(values) * values.itemsize
        return self._on_device[offset : offset + num_bytes].view(_DTYPES[values.typecode])

    def _make_buffers(self, num_bytes: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._bytes: Any = self._host.numpy().data
        self._on_device = self._host if not pinned else torch.empty_like(self._host, device=self._device)


class Download:
    """Copies one int32 tensor to the host; waiting for it is waiting for everything that was launched before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = _event(device)
        self._host = torch.empty(0, dtype=torch.int32)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """The values in host memory; they live until the next `fetch`."""
        if self._done is None:
            return values
        if values.numel() > self._host.numel():
            size = 1 << (values.numel() - 1).bit_length()
            self._host = torch.empty(size, dtype=torch.int32, pin_memory=True)
        target = self._host[: values.numel()]
        target.copy_(values, non_blocking=True)
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return target


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Waits use an event, since torch's debug mode reports every other wait as an implicit one."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def packed_bytes(sizes: Sequence[int]) -> int:
    """Returns the bytes that arrays of these sizes take in an upload, padding included."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def padded(values: array[int], size: int, value: int) -> array[int]:
    """Returns the values, padded with `value` to `size`."""
    missing = size - len(values)
    return values + array(values.typecode, (value,)) * missing if missing > 0 else values


def _layout(arrays: Sequence[HostArray]) -> tuple[list[int], int]:
    """Returns each array's offset in bytes, aligned for every dtype, and where the last one ends."""
    offsets, end = [], 0
    for values in arrays:
        offsets.append(end)
        end += -(-len(values) * values.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end
