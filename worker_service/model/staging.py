"""Copies host arrays to the device and results back: one copy each way per launch, through pinned memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

HostArray: TypeAlias = "array[int] | array[float]"

_DTYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32}
_ALIGNMENT = 16
_SMALLEST_BYTES = 1 << 16


# Host buffers in turn: one is filled while the copy of the other waits behind a launch that is still running.
NUM_BUFFERS = 2


class Upload:
    """Packs arrays into one buffer that crosses in one copy; its tensors are views that live until the next `send`."""

    def __init__(self, device: torch.device, num_bytes: int = _SMALLEST_BYTES) -> None:
        """Up to `num_bytes` the buffer does not move, so that tensors of an equal layout keep their addresses."""
        self._device = device
        self._buffers = deque(HostBuffer(num_bytes, device) for _ in range(NUM_BUFFERS if is_cuda(device) else 1))
        self._on_device = self._device_buffer()

    def send(self, arrays: Sequence[HostArray], viewed: slice = slice(None)) -> list[torch.Tensor]:
        """Returns the tensors of those arrays that `viewed` takes; each costs the host some microseconds."""
        offsets, end = _layout(arrays)
        self._buffers.rotate()
        if end > self._on_device.numel():
            self._buffers = deque(HostBuffer(1 << (end - 1).bit_length(), self._device) for _ in self._buffers)
            self._on_device = self._device_buffer()
        buffer = self._buffers[0]
        buffer.wait()
        for values, offset in zip(arrays, offsets, strict=True):
            raw = memoryview(values).cast("B")
            buffer.bytes[offset : offset + len(raw)] = raw
        if self._on_device is not buffer.tensor:
            self._on_device[:end].copy_(buffer.tensor[:end], non_blocking=True)
        buffer.mark()
        return [self._view(values, offset) for values, offset in zip(arrays[viewed], offsets[viewed], strict=True)]

    def _view(self, values: HostArray, offset: int) -> torch.Tensor:
        num_bytes = len(values) * values.itemsize
        return self._on_device[offset : offset + num_bytes].view(_DTYPES[values.typecode])

    def _device_buffer(self) -> torch.Tensor:
        first = self._buffers[0].tensor
        return torch.empty_like(first, device=self._device) if is_cuda(self._device) else first


class HostBuffer:
    """Pinned memory that a copy on the current stream reads or writes; `wait` waits for the last marked copy."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda(device))
        self.bytes: Any = self.tensor.numpy().data
        self._device = device
        # Blocking, because PyTorch's sync debug mode reports every other wait as an implicit one.
        self._copied = torch.cuda.Event() if is_cuda(device) else None  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


class Download:
    """Copies int32 tensors to the host; up to NUM_BUFFERS of them may be on their way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = deque(HostBuffer(_SMALLEST_BYTES, device) for _ in range(NUM_BUFFERS))

    def start(self, values: torch.Tensor) -> Downloaded:
        """Starts a copy of the values, behind everything that was launched before."""
        if not is_cuda(self._device):
            return Downloaded(values.clone(), None)
        self._buffers.rotate()
        num_bytes = values.numel() * values.itemsize
        if num_bytes > self._buffers[0].tensor.numel():
            self._buffers[0] = HostBuffer(1 << (num_bytes - 1).bit_length(), self._device)
        buffer = self._buffers[0]
        target = buffer.tensor[:num_bytes].view(torch.int32)
        target.copy_(values, non_blocking=True)
        buffer.mark()
        return Downloaded(target, buffer)


class Downloaded(NamedTuple):
    """A copy under way; its values are valid until NUM_BUFFERS further ones were started."""

    values: torch.Tensor
    buffer: HostBuffer | None

    def wait(self) -> torch.Tensor:
        """Returns the values once they, and everything that was launched before them, have arrived."""
        if self.buffer is not None:
            self.buffer.wait()
        return self.values


def is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


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
