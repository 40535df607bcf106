"""Copies stored tensors to the device: on CUDA through two pinned buffers in turn.

    host     read chunk 1 | read chunk 2 | read chunk 3 | ...      pages of the mapped file -> a pinned buffer
    device                | copy chunk 1 | copy chunk 2 | ...      a pinned buffer -> the tensor

A copy from pageable memory waits for its end, so that reading and copying take turns. The copies are queued on the
current stream: what computes with the tensor comes behind them, and no other stream has to be waited for.
"""

from __future__ import annotations

from collections import deque

import torch

from worker_service.model.staging import NUM_BUFFERS, HostBuffer, is_cuda

# Large enough that a copy takes longer than to queue it: 1.2 ms at 55 GB/s.
CHUNK_BYTES = 64 << 20


class WeightCopies:
    """Tensors of a checkpoint on one device."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._buffers: deque[HostBuffer] = deque()

    def copied(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns the tensor on the device; on the CPU the stored one itself."""
        return self.through_buffers(stored) if is_cuda(self._device) else stored

    def through_buffers(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the device, made chunk by chunk. `stored` may go as soon as this returns."""
        made = torch.empty_like(stored, device=self._device, memory_format=torch.contiguous_format)
        source, target = _as_bytes(stored), _as_bytes(made)
        for start in range(0, source.numel(), self._chunk_bytes):
            chunk = source[start : start + self._chunk_bytes]
            buffer = self._next_buffer()
            buffer.wait()
            held = buffer.tensor[: chunk.numel()]
            held.copy_(chunk)
            target[start : start + chunk.numel()].copy_(held, non_blocking=True)
            buffer.mark()
        return made

    def _next_buffer(self) -> HostBuffer:
        """Returns the one whose copy began longest ago; they are made when the first tensor needs them."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.appendleft(HostBuffer(self._chunk_bytes, self._device))
        else:
            self._buffers.rotate()
        return self._buffers[0]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
