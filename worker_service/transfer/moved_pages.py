"""What a transfer moves: pages of groups, each under a key of the host tier."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from session.words import Transfer, TransferPages
from tier_client.page_codec import CODEC_RAW, Digest, PageKind

# Without tensor parallelism a worker is its only rank.
RANK = 0


class PageStore(Protocol):
    """The device side: pages of every group as bytes in host memory."""

    @property
    def device(self) -> torch.device: ...

    def page_bytes(self, group: int) -> int: ...

    def read_pages(self, group: int, page_ids: Sequence[int]) -> torch.Tensor: ...

    def write_pages(self, group: int, page_ids: Sequence[int], packed: torch.Tensor) -> None: ...

    def host_bytes(self, num_bytes: int) -> torch.Tensor: ...

    def read_part(self, group: int, page_id: int, first_byte: int, out: torch.Tensor) -> None: ...

    def write_part(self, group: int, page_id: int, first_byte: int, data: torch.Tensor) -> None: ...

    def host_buffer(self, group: int, num_pages: int) -> torch.Tensor: ...


class PageFrame(NamedTuple):
    """What every page of this worker is framed with: a code of each group's element type, and the checksum function."""

    dtypes: tuple[int, ...]
    digest: Digest

    def kind(self, group: int) -> PageKind:
        return PageKind(CODEC_RAW, self.dtypes[group], group, RANK)


class MovedPage(NamedTuple):
    """One page of one group within a transfer; `page` counts from the transfer's first page."""

    page: int
    group: int
    page_id: int
    key: bytes


def moved_pages(transfer: Transfer, start: int, end: int) -> list[MovedPage]:
    """Returns what moves of the pages [start, end), page by page, so that leading values mean leading pages."""
    tables = [(group, _page_ids(group)) for group in transfer.groups]
    return [
        MovedPage(page, group.group, page_ids[page], group.key(page, RANK))
        for page in range(start, end)
        for group, page_ids in tables
        if page_ids[page]
    ]


def _page_ids(group: TransferPages) -> array[int]:
    page_ids = array("I")
    page_ids.frombytes(group.page_ids)
    return page_ids
