"""Copies host arrays to the device and results back: one copy each way per launch, through pinned memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import torch

HostArray: TypeAlias = "array[int] | array[float]"
# A HostArray's memory in a HostBuffer.
HostView: TypeAlias = "memoryview[int] | memoryview[float]"

_DTYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32}
_ALIGNMENT = 16
_SMALLEST_BYTES = 1 << 16


# Host buffers in turn: one is filled while the copy of the other waits behind a launch that is still running.
NUM_BUFFERS = 2


class Upload:
    """Packs arrays into one buffer that crosses in one copy; its tensors are views that live until the next `send`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = deque(_host_buffers(_SMALLEST_BYTES, device))
        self._on_device = _device_buffer(self._buffers[0], device)

    def send(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        offsets, end = _layout(arrays)
        self._buffers.rotate()
        if end > self._on_device.numel():
            self._buffers = deque(_host_buffers(1 << (end - 1).bit_length(), self._device))
            self._on_device = _device_buffer(self._buffers[0], self._device)
        buffer = self._buffers[0]
        buffer.wait()
        buffer.write(arrays, offsets)
        buffer.copy_to(self._on_device, end)
        return _views(self._on_device, arrays, offsets)


class FixedUpload:
    """Arrays of fixed sizes, and any others behind them, in one copy; captured graphs read `tensors`, the fixed ones.

    `begin` gives what the host writes to, `send` copies it: each once for a launch. What is not written is padding.
    """

    def __init__(self, device: torch.device, padding: Sequence[HostArray], num_bytes: int) -> None:
        """`padding`: the fixed arrays as they are without a launch; num_bytes: the most that others take, packed."""
        offsets, self._end = _layout(padding)
        buffers = _host_buffers(self._end + num_bytes, device)
        self._on_device = _device_buffer(buffers[0], device)
        self._turns = cycle([(buffer, buffer.views(padding, offsets)) for buffer in buffers])
        self._buffer = buffers[0]
        self._buffer.write(padding, offsets)
        self._padding = bytes(self._buffer.bytes[: self._end])
        self._buffer.copy_to(self._on_device, self._end)
        self.tensors = _views(self._on_device, padding, offsets)

    def begin(self) -> Sequence[HostView]:
        """Returns the fixed arrays of the next copy, with nothing but padding in them."""
        self._buffer, views = next(self._turns)
        self._buffer.wait()
        self._buffer.bytes[: self._end] = self._padding
        return views

    def send(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        """Returns the tensors of `arrays`, which follow the fixed ones."""
        offsets, end = _layout(arrays, self._end)
        self._buffer.write(arrays, offsets)
        self._buffer.copy_to(self._on_device, end)
        return _views(self._on_device, arrays, offsets)


class HostBuffer:
    """Pinned memory that a copy on the current stream reads or writes; `wait` waits for the last marked copy."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda(device))
        self.bytes: Any = self.tensor.numpy().data
        self._device = device
        # Blocking, because PyTorch's sync debug mode reports every other wait as an implicit one.
        self._copied = torch.cuda.Event() if is_cuda(device) else None  # type: ignore[no-untyped-call]

    def write(self, arrays: Sequence[HostArray], offsets: Sequence[int]) -> None:
        for values, offset in zip(arrays, offsets, strict=True):
            raw = memoryview(values).cast("B")
            self.bytes[offset : offset + len(raw)] = raw

    def views(self, arrays: Sequence[HostArray], offsets: Sequence[int]) -> list[HostView]:
        """Returns this memory as arrays of such types and sizes."""
        return [
            self.bytes[offset : offset + len(values) * values.itemsize].cast(values.typecode)
            for values, offset in zip(arrays, offsets, strict=True)
        ]

    def copy_to(self, on_device: torch.Tensor, end: int) -> None:
        """Starts a copy of the first bytes, and marks it; none where `on_device` is this memory."""
        if on_device is not self.tensor:
            on_device[:end].copy_(self.tensor[:end], non_blocking=True)
        self.mark()

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


def put(values: HostArray, target: HostView, first: int = 0) -> None:
    """Writes the values from entry `first` of the target on; they are of its type, and it has room for them."""
    target[first : first + len(values)] = values


def padded(values: array[int], size: int, value: int) -> array[int]:
    """Returns the values, padded with `value` to `size`."""
    missing = size - len(values)
    return values + array(values.typecode, (value,)) * missing if missing > 0 else values


def _layout(arrays: Sequence[HostArray], first: int = 0) -> tuple[list[int], int]:
    """Returns each array's offset in bytes, aligned for every dtype, from `first` on, and where the last one ends."""
    offsets, end = [], first
    for values in arrays:
        offsets.append(end)
        end += -(-len(values) * values.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _host_buffers(num_bytes: int, device: torch.device) -> list[HostBuffer]:
    return [HostBuffer(num_bytes, device) for _ in range(NUM_BUFFERS if is_cuda(device) else 1)]


def _device_buffer(like: HostBuffer, device: torch.device) -> torch.Tensor:
    """Returns the memory that host buffers are copied to; on a CPU the buffer's own."""
    return torch.empty_like(like.tensor, device=device) if is_cuda(device) else like.tensor


def _views(on_device: torch.Tensor, arrays: Sequence[HostArray], offsets: Sequence[int]) -> list[torch.Tensor]:
    """Returns the tensors that such arrays are there; each costs the host some microseconds."""
    return [
        on_device[offset : offset + len(values) * values.itemsize].view(_DTYPES[values.typecode])
        for values, offset in zip(arrays, offsets, strict=True)
    ]
