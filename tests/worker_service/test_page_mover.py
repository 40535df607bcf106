"""Transfers between page tensors and a host tier: what arrives, what is acknowledged, and what every fault becomes."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import xxhash

from session.messages import Ack
from session.words import TicketId, Transfer, TransferPages, TransferStatus
from tests.faulty_tier import FaultPlan, FaultyTier
from tests.worker_service.kv_layouts import kv_layouts
from tier_client.page_codec import HEADER_BYTES
from worker_service.core.ports import HostTier
from worker_service.gpu.page_pools import PagePools
from worker_service.host_tier.memory import MemoryTier
from worker_service.transfer import page_mover
from worker_service.transfer.moved_pages import PageFrame
from worker_service.transfer.page_mover import MoverLimits, PageMover

NUM_PAGES = 24
FRAME = PageFrame(dtypes=(1, 1), digest=lambda data: xxhash.xxh3_128_digest(data))


def make_pages(seed: int, windows: tuple[int, ...] = (0, 0, 8)) -> PagePools:
    """Two groups: layers that see everything, and one with a window."""
    layouts = kv_layouts(windows, head_dim=4)
    groups = len(set(windows))
    pages = PagePools(layouts, [NUM_PAGES] * len(layouts), 4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for group in range(groups):
        size = pages.page_bytes(group)
        rows = torch.randint(0, 256, (NUM_PAGES, size), dtype=torch.uint8, generator=generator)
        pages.write_pages(group, range(1, NUM_PAGES + 1), rows)
    return pages


def transfer(ticket: int, tables: Sequence[Sequence[int]], holes: Sequence[tuple[int, int]] = ()) -> Transfer:
    """`tables[group]` are page ids; `holes` are (group, page) places that do not move."""
    groups = []
    for group, page_ids in enumerate(tables):
        ids = [0 if (group, page) in holes else page_id for page, page_id in enumerate(page_ids)]
        hashes = b"".join(page.to_bytes(32, "big") for page in range(len(page_ids)))
        groups.append(TransferPages(group, array("I", ids).tobytes(), f"key:{group}:", hashes))
    return Transfer(TicketId(ticket), tuple(groups), 3, len(tables[0]))


def name(group: int, page: int) -> bytes:
    """The key of a page of `transfer`."""
    return f"key:{group}:0:{page:064x}".encode()


class MoverHarness:
    """A mover and the acks that it handed over."""

    def __init__(self, pages: PagePools, tier: HostTier, limits: MoverLimits | None = None) -> None:
        self.acks: list[Ack] = []
        self.mover = PageMover(pages, tier, FRAME, self.acks.append, limits or MoverLimits())

    async def spill(self, order: Transfer) -> Ack:
        self.mover.spill(order)
        await self.mover.drain()
        return self.acks[-1]

    async def fetch(self, order: Transfer) -> Ack:
        self.mover.fetch(order, lambda: None)
        await self.mover.drain()
        return self.acks[-1]


def page(pages: PagePools, group: int, page_id: int) -> bytes:
    return pages.read_pages(group, [page_id]).numpy().tobytes()


async def test_pages_of_all_groups_arrive_on_another_device_bit_for_bit() -> None:
    tier = MemoryTier(1 << 20)
    here, there = make_pages(1), make_pages(2)
    out = [[1 + i for i in range(11)], [24 - i for i in range(11)]]
    target = [[12 + i for i in range(11)], [2 + i for i in range(11)]]
    holes = [(1, 0), (1, 1)]
    spilled = await MoverHarness(here, tier).spill(transfer(7, out, holes))
    before = page(there, 1, target[1][0])
    fetched = await MoverHarness(there, tier).fetch(transfer(8, target, holes))
    moved_bytes = 11 * here.page_bytes(0) + 9 * here.page_bytes(1)
    assert spilled[:4] == (7, 11, TransferStatus.DONE, moved_bytes)
    assert fetched[:4] == (8, 11, TransferStatus.DONE, moved_bytes)
    assert spilled.seconds > 0
    for at in range(11):
        assert page(there, 0, target[0][at]) == page(here, 0, out[0][at])
        if at >= 2:
            assert page(there, 1, target[1][at]) == page(here, 1, out[1][at])
    assert page(there, 1, target[1][0]) == before, "a hole was written to"


async def test_of_a_prompt_in_several_transfers_memory_keeps_the_beginning() -> None:
    """Two groups, the second one with holes: what is left of both are the first pages."""
    pages = make_pages(1)
    row_bytes = [pages.page_bytes(group) + HEADER_BYTES for group in range(2)]
    tier = MemoryTier(30 * row_bytes[0])
    harness = MoverHarness(pages, tier)
    ids = [list(range(1, 13))] * 2
    holes = [(1, page) for page in range(10)]

    def part(ticket: int, prompt: int, first: int) -> Transfer:
        """12 pages of a prompt, from page `first` on."""
        hashes = b"".join((prompt * 1000 + page).to_bytes(32, "big") for page in range(first, first + 12))
        moved = transfer(ticket, ids, holes)
        groups = tuple(group._replace(page_hashes=hashes) for group in moved.groups)
        return moved._replace(groups=groups, first_page=first)

    for ticket, first in enumerate((0, 12, 24), start=1):
        harness.mover.spill(part(ticket, 1, first))
        await harness.mover.drain()
    await harness.spill(part(9, 2, 0))
    assert tier.num_bytes <= 30 * row_bytes[0]
    left = [page for page in range(36) if tier.get([name(0, 1000 + page)], 1 << 20) != [None]]
    assert left == list(range(len(left))) and 10 < len(left) < 20
    assert all(tier.get([name(0, 2000 + page)], 1 << 20) != [None] for page in range(12))


@pytest.mark.parametrize("missing", [0, 3, 4, 10])
async def test_a_fetch_stops_at_the_first_page_that_lacks_any_group(missing: int) -> None:
    tier = MemoryTier(1 << 20)
    here, there = make_pages(1), make_pages(2)
    ids = [list(range(1, 12))] * 2
    await MoverHarness(here, tier).spill(transfer(1, ids, [(1, missing)]))
    untouched = [page(there, 0, ids[0][at]) for at in range(missing, 11)]
    ack = await MoverHarness(there, tier).fetch(transfer(2, ids))
    assert ack[:3] == (2, missing, TransferStatus.MISSING)
    assert [page(there, 0, ids[0][at]) for at in range(missing)] == [page(here, 0, ids[0][at]) for at in range(missing)]
    assert [page(there, 0, ids[0][at]) for at in range(missing, 11)] == untouched


@pytest.mark.parametrize("offset", [0, 5, 17, 40, 63, 64, -1])
async def test_a_tampered_value_is_corrupt_and_never_written(offset: int) -> None:
    tier = MemoryTier(1 << 20)
    here, there = make_pages(1, (0,)), make_pages(2, (0,))
    await MoverHarness(here, tier).spill(transfer(1, [[1, 2, 3]]))
    value = bytearray(tier.get([name(0, 1)], 1 << 20)[0] or b"")
    value[offset] ^= 1
    tier.put([name(0, 1)], [[bytes(value)]])
    before = page(there, 0, 2)
    ack = await MoverHarness(there, tier).fetch(transfer(2, [[1, 2, 3]]))
    assert ack[:3] == (2, 1, TransferStatus.CORRUPT)
    assert page(there, 0, 2) == before


async def test_a_value_under_another_pages_key_is_corrupt() -> None:
    tier = MemoryTier(1 << 20)
    here, there = make_pages(1, (0,)), make_pages(2, (0,))
    await MoverHarness(here, tier).spill(transfer(1, [[1, 2]]))
    tier.put([name(0, 0)], [[bytes(tier.get([name(0, 1)], 1 << 20)[0] or b"")]])
    assert (await MoverHarness(there, tier).fetch(transfer(2, [[1, 2]])))[:3] == (2, 0, TransferStatus.CORRUPT)


async def test_a_full_tier_acknowledges_the_leading_pages_only() -> None:
    here = make_pages(1, (0,))
    tier = FaultyTier(MemoryTier(1 << 20), FaultPlan(seed=14, partial=1.0))  # stores 3 values of the first 8
    ack = await MoverHarness(here, tier).spill(transfer(1, [list(range(1, 12))]))
    assert ack[:4] == (1, 3, TransferStatus.FAILED, 3 * here.page_bytes(0))


async def test_a_broken_tier_fails_every_ticket_and_is_left_alone_for_a_while() -> None:
    tier = FaultyTier(MemoryTier(1 << 20), FaultPlan(fail=1.0))
    harness = MoverHarness(make_pages(1, (0,)), tier, MoverLimits(threads=1, breaker_failures=2, breaker_s=60.0))
    for ticket in range(6):
        assert (await harness.spill(transfer(ticket, [[1]])))[:3] == (ticket, 0, TransferStatus.FAILED)
    assert (await harness.fetch(transfer(6, [[1]])))[:3] == (6, 0, TransferStatus.FAILED)
    assert tier.num_calls == 2
    assert len(harness.acks) == 7


async def test_nothing_is_written_before_the_barrier_and_everything_after_it() -> None:
    tier = MemoryTier(1 << 20)
    here, there = make_pages(1, (0,)), make_pages(2, (0,))
    await MoverHarness(here, tier).spill(transfer(1, [[1]]))
    harness, launch_ended, asked = MoverHarness(there, tier), threading.Event(), threading.Event()
    before = page(there, 0, 1)

    def barrier() -> None:
        asked.set()
        launch_ended.wait(30)

    harness.mover.fetch(transfer(2, [[1]]), barrier)
    await asyncio.to_thread(asked.wait, 30)
    assert page(there, 0, 1) == before
    assert harness.acks == []
    launch_ended.set()
    await harness.mover.drain()
    assert harness.acks[0][:3] == (2, 1, TransferStatus.DONE)
    assert page(there, 0, 1) == page(here, 0, 1)


async def test_the_wait_for_launches_is_no_part_of_a_transfers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of fetches would otherwise be that of launches, and fetches declined for it."""
    now_s = [100.0]
    monkeypatch.setattr(page_mover, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def barrier() -> None:
        now_s[0] += 5.0

    tier = MemoryTier(1 << 20)
    await MoverHarness(make_pages(1, (0,)), tier).spill(transfer(1, [[1]]))
    harness = MoverHarness(make_pages(2, (0,)), tier)
    harness.mover.fetch(transfer(2, [[1]]), barrier)
    await harness.mover.drain()
    assert now_s[0] >= 105.0 and 0 < harness.acks[0].seconds < 1.0


async def test_more_transfers_than_may_wait_fail_at_once_and_the_others_go_on() -> None:
    tier = MemoryTier(1 << 20)
    pages, gate = make_pages(1, (0,)), threading.Event()
    await MoverHarness(pages, tier).spill(transfer(0, [[1]]))
    harness = MoverHarness(pages, tier, MoverLimits(threads=1, max_queued=2))
    for ticket in (1, 2, 3):
        harness.mover.fetch(transfer(ticket, [[1]]), lambda: gate.wait(30))
    await asyncio.sleep(0)
    assert [ack[:3] for ack in harness.acks] == [(3, 0, TransferStatus.FAILED)]
    gate.set()
    await harness.mover.drain()
    assert sorted(ack.ticket for ack in harness.acks if ack.status is TransferStatus.DONE) == [1, 2]


async def test_an_order_for_a_page_that_does_not_exist_ends_as_a_failed_ack(caplog: pytest.LogCaptureFixture) -> None:
    ack = await MoverHarness(make_pages(1, (0,)), MemoryTier(1 << 20)).spill(transfer(1, [[NUM_PAGES + 1]]))
    assert ack[:3] == (1, 0, TransferStatus.FAILED)
    assert "page id" in caplog.text
