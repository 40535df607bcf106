"""Carries pages between a DeviceMemory and a host tier that is a dict, by the tickets of a real cache manager."""

from __future__ import annotations

import random
from collections.abc import Iterator

from session.messages import Ack
from session.words import Transfer, TransferStatus
from tests.worker_service.device_memory import DeviceMemory


class HostMover:
    """`rng` decides whether a fetch is carried out now or later, and which one fails; without one each succeeds now."""

    def __init__(self, memory: DeviceMemory, rng: random.Random | None) -> None:
        self._memory, self._rng = memory, rng
        self.store: dict[bytes, tuple[int | None, ...]] = {}
        self.fetches: list[Transfer] = []
        self.spills: list[Transfer] = []
        self.is_stalled = False

    @property
    def is_idle(self) -> bool:
        return not self.fetches and not self.spills

    def forget(self) -> None:
        """What was ordered is void."""
        self.fetches.clear()
        self.spills.clear()

    def move(self) -> Iterator[Ack]:
        """Yields the acks of what was carried out now."""
        if self.is_stalled:
            return
        now = [transfer for transfer in self.fetches if self._rng is None or self._rng.random() < 0.5]
        self.fetches = [transfer for transfer in self.fetches if transfer not in now]
        spills, self.spills = self.spills, []
        for transfer in now:
            yield self._fetch(transfer)
        for transfer in spills:
            for page in range(transfer.num_pages):
                for key, group, page_id in self.parts(transfer, page):
                    self.store[key] = self._memory.read_page(group, page_id)
            yield Ack(transfer.ticket, transfer.num_pages, TransferStatus.DONE)

    def _fetch(self, transfer: Transfer) -> Ack:
        for page in range(transfer.num_pages):
            parts = self.parts(transfer, page)
            if any(key not in self.store for key, _, _ in parts) or self._happens(0.1):
                return Ack(transfer.ticket, page, TransferStatus.MISSING)
            if self._happens(0.05):
                return Ack(transfer.ticket, page, TransferStatus.FAILED)
            for key, group, page_id in parts:
                self._memory.write_page(group, page_id, self.store[key])
        return Ack(transfer.ticket, transfer.num_pages, TransferStatus.DONE)

    def parts(self, transfer: Transfer, page: int) -> list[tuple[bytes, int, int]]:
        """Returns key, group and page id of what moves at that page of the run."""
        ids = [(moved, memoryview(moved.page_ids).cast("I")[page]) for moved in transfer.groups]
        return [(moved.key(page, 0), moved.group, page_id) for moved, page_id in ids if page_id]

    def _happens(self, probability: float) -> bool:
        return self._rng is not None and self._rng.random() < probability
