"""Moves a page that is too large for one value, a recurrent state's snapshot for one: part by part.

Each thread stages one part at a time, in a buffer that it keeps: a snapshot of hundreds of megabytes takes no more on
its way.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import torch

from session.words import TransferStatus
from tier_client.errors import PageRejected
from tier_client.part_codec import (
    PART_HEADER_BYTES,
    WRITE_ID_BYTES,
    PagePart,
    cut_page,
    decode_part,
    encode_part_header,
)
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
        return tier.put_parts(item.key, self._framed(item))

    def fetch(self, tier: HostTier, item: MovedPage, barrier: Callable[[], None]) -> TransferStatus:
        """Returns DONE, MISSING or CORRUPT, and then some of the page may be written. Raises HostTierError."""
        cut, write_id = self._cut(item), b""
        kind = self._frame.kind(item.group)
        with closing(tier.get_parts(item.key, len(cut), self._part_bytes + PART_HEADER_BYTES)) as values:
            for part in cut:
                value = next(values, None)
                if value is None:
                    return TransferStatus.MISSING
                try:
                    payload, write_id = decode_part(value, kind, item.key, part, write_id, self._frame.digest)
                except PageRejected as error:
                    _log.warning("part %d of a page of group %d rejected: %s", part.number, item.group, error)
                    return TransferStatus.CORRUPT
                barrier()
                self._pages.write_part(item.group, item.page_id, part.first_byte, self._on_host(payload))
        return TransferStatus.DONE

    def _cut(self, item: MovedPage) -> tuple[PagePart, ...]:
        return cut_page(self._pages.page_bytes(item.group), self._part_bytes)

    def _framed(self, item: MovedPage) -> Iterator[tuple[bytes, memoryview]]:
        kind, digest = self._frame.kind(item.group), self._frame.digest
        write_id = secrets.token_bytes(WRITE_ID_BYTES)
        for part in self._cut(item):
            data = self._buffer()[: part.num_bytes]
            self._pages.read_part(item.group, item.page_id, part.first_byte, data)
            payload = memoryview(data.numpy().data)
            yield encode_part_header(kind, item.key, part, write_id, payload, digest), payload

    def _on_host(self, payload: memoryview) -> torch.Tensor:
        """Returns the bytes as a tensor that a device can copy from: in pinned memory beside a CUDA device."""
        data = torch.frombuffer(payload, dtype=torch.uint8)
        return self._buffer()[: data.numel()].copy_(data) if self._pages.device.type == "cuda" else data

    def _buffer(self) -> torch.Tensor:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = self._pages.host_bytes(self._part_bytes)
        buffer: torch.Tensor = self._local.buffer
        return buffer
