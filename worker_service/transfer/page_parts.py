"""Moves a page that is too large for one value between a device and a host tier.

Each thread stages one part at a time, in a buffer that it keeps: a snapshot of hundreds of megabytes takes no more on
its way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing

import torch

from session.words import TransferStatus
from tier_client.errors import PageAbsent, PageRejected
from tier_client.large_pages import LargePage
from tier_client.part_codec import PagePart
from worker_service.core.ports import HostTier
from worker_service.transfer.moved_pages import MovedPage, PageFrame, PageStore

_log = logging.getLogger(__name__)


class PageParts:
    """Pages of more than `part_bytes` between a device and a host tier."""

    def __init__(self, pages: PageStore, frame: PageFrame, part_bytes: int) -> None:
        self._pages = pages
        self._frame = frame
        self._part_bytes = part_bytes
        self._local = threading.local()

    def takes(self, item: MovedPage) -> bool:
        """Returns whether the page has more than one part; others are whole values."""
        return self._pages.page_bytes(item.group) > self._part_bytes

    def spill(self, tier: HostTier, item: MovedPage) -> bool:
        """Returns False where the store is full. Raises HostTierError."""
        return self._page(item).put(tier, lambda part: self._read(item, part), self._frame.digest)

    def fetch(self, tier: HostTier, item: MovedPage, barrier: Callable[[], None]) -> TransferStatus:
        """Returns DONE, MISSING or CORRUPT, and then some of the page may be written. Raises HostTierError."""
        try:
            with closing(self._page(item).get(tier, self._frame.digest)) as parts:
                for part, payload in parts:
                    barrier()
                    self._pages.write_part(item.group, item.page_id, part.first_byte, self._on_host(payload))
        except PageAbsent:
            return TransferStatus.MISSING
        except PageRejected as error:
            _log.warning("a page of group %d rejected: %s", item.group, error)
            return TransferStatus.CORRUPT
        return TransferStatus.DONE

    def _page(self, item: MovedPage) -> LargePage:
        page_bytes = self._pages.page_bytes(item.group)
        return LargePage(self._frame.kind(item.group), item.key, page_bytes, self._part_bytes)

    def _read(self, item: MovedPage, part: PagePart) -> memoryview:
        data = self._buffer()[: part.num_bytes]
        self._pages.read_part(item.group, item.page_id, part.first_byte, data)
        return memoryview(data.numpy().data)

    def _on_host(self, payload: memoryview) -> torch.Tensor:
        """Returns the bytes as a tensor that a device can copy from: in pinned memory beside a CUDA device."""
        data = torch.frombuffer(payload, dtype=torch.uint8)
        return self._buffer()[: data.numel()].copy_(data) if self._pages.device.type == "cuda" else data

    def _buffer(self) -> torch.Tensor:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = self._pages.host_bytes(self._part_bytes)
        buffer: torch.Tensor = self._local.buffer
        return buffer
