"""Pages that are larger than a part: what arrives, what is staged at a time, and what every fault in a part becomes."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from itertools import islice

import pytest
import torch

from session.words import GroupKind, TransferStatus
from tests.faulty_tier import FaultPlan, FaultyTier
from tests.worker_service.kv_layouts import kv_layouts
from tests.worker_service.test_page_mover import MoverHarness, name, page, transfer
from tier_client.part_codec import PART_HEADER_BYTES
from worker_service.gpu.group_layout import GroupLayout, PageTensor
from worker_service.gpu.page_pools import PagePools
from worker_service.host_tier.memory import MemoryTier
from worker_service.transfer.page_mover import MoverLimits

NUM_PAGES = 8
PART_BYTES = 512
LIMITS = MoverLimits(part_bytes=PART_BYTES)
IDS = [[1, 2, 3, 4], [5, 6, 7, 8]]
# Of four pages the second and the last have a snapshot.
HOLES = [(1, 0), (1, 2)]


class StagedPages(PagePools):
    """Notes how many bytes each call moved."""

    def __init__(self, *arguments: object) -> None:
        self.staged_bytes: list[int] = []
        super().__init__(*arguments)  # type: ignore[arg-type]

    def host_buffer(self, group: int, num_pages: int) -> torch.Tensor:
        self.staged_bytes.append(num_pages * self.page_bytes(group))
        return super().host_buffer(group, num_pages)

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        self.staged_bytes.append(num_bytes)
        return super().host_bytes(num_bytes)


def make_pages(seed: int) -> StagedPages:
    """Pages of 256 bytes, and states of 1,720, which is four parts."""
    (full,) = kv_layouts((0,), head_dim=4)
    tensors = (PageTensor(1, (3, 50), torch.bfloat16), PageTensor(2, (70,), torch.float32))
    layouts = (full, GroupLayout("state", GroupKind.STATE, (1, 2), tensors))
    pages = StagedPages(layouts, [NUM_PAGES, NUM_PAGES], 4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for group in range(2):
        rows = torch.randint(0, 256, (NUM_PAGES, pages.page_bytes(group)), dtype=torch.uint8, generator=generator)
        pages.write_pages(group, range(1, NUM_PAGES + 1), rows)
    pages.staged_bytes.clear()
    return pages


def parts_of(tier: MemoryTier, number: int) -> list[bytes]:
    value = tier._values[name(1, number)]
    assert isinstance(value, tuple)
    return list(value)


async def spilled(tier: MemoryTier, seed: int = 1, holes: Sequence[tuple[int, int]] = HOLES) -> StagedPages:
    here = make_pages(seed)
    ack = await MoverHarness(here, tier, LIMITS).spill(transfer(1, IDS, holes))
    assert ack[:3] == (1, 4, TransferStatus.DONE)
    return here


async def test_large_and_small_pages_arrive_bit_for_bit_and_a_part_is_staged_at_a_time() -> None:
    tier = MemoryTier(1 << 20)
    here, there = await spilled(tier), make_pages(2)
    assert max(here.staged_bytes) <= 4 * here.page_bytes(0)
    ack = await MoverHarness(there, tier, LIMITS).fetch(transfer(2, IDS, HOLES))
    moved_bytes = 4 * here.page_bytes(0) + 2 * here.page_bytes(1)
    assert ack[:4] == (2, 4, TransferStatus.DONE, moved_bytes)
    assert max(there.staged_bytes) <= 4 * here.page_bytes(0) < here.page_bytes(1)
    for group, table in enumerate(IDS):
        for at, page_id in enumerate(table):
            moved = (group, at) not in HOLES
            assert (page(there, group, page_id) == page(here, group, page_id)) is moved
    sizes = [len(part) - PART_HEADER_BYTES for part in parts_of(tier, 1)]
    assert sizes == [512, 512, 512, 1720 - 3 * 512]
    assert all(isinstance(tier._values[name(0, at)], bytes) for at in range(4)), "small pages are whole values"


async def test_another_size_of_parts_is_a_miss() -> None:
    """The fingerprint keeps such workers apart; if ever they meet, nothing is taken for a page."""
    tier = MemoryTier(1 << 20)
    await spilled(tier)
    for part_bytes, status in ((256, TransferStatus.MISSING), (600, TransferStatus.CORRUPT), (1 << 20, None)):
        limits = MoverLimits(part_bytes=part_bytes)
        ack = await MoverHarness(make_pages(2), tier, limits).fetch(transfer(2, IDS, HOLES))
        assert ack[:3] == (2, 1, status or TransferStatus.MISSING)


@pytest.mark.parametrize("number", range(4))
async def test_a_missing_part_is_a_missing_page(number: int) -> None:
    """Only what is behind it can be missing in a store of tuples: the parts are cut off there."""
    tier = MemoryTier(1 << 20)
    here, there = await spilled(tier), make_pages(2)
    tier._values[name(1, 3)] = tuple(parts_of(tier, 3)[:number])
    ack = await MoverHarness(there, tier, LIMITS).fetch(transfer(2, IDS, HOLES))
    assert ack[:3] == (2, 3, TransferStatus.MISSING)
    assert [page(there, 0, page_id) == page(here, 0, page_id) for page_id in IDS[0]] == [True, True, True, False]


def spoil(rng: random.Random, parts: list[bytes], others: list[bytes], rewritten: list[bytes]) -> list[bytes]:
    """Returns the parts changed in one way; `others` are another snapshot's, `rewritten` those of another writing."""
    at, other = rng.sample(range(len(parts)), 2)
    flipped = bytearray(parts[at])
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    changes: list[dict[int, bytes]] = [
        {at: bytes(flipped)},
        {at: parts[other], other: parts[at]},
        {at: parts[other]},
        {at: others[at]},
        {at: rewritten[at]},
        {at: parts[at][: rng.randrange(len(parts[at]))]},
    ]
    change = rng.randrange(len(changes) + 1)
    if change == len(changes):
        return parts[:at] + parts[at + 1 :]
    return [changes[change].get(number, part) for number, part in enumerate(parts)]


@pytest.mark.parametrize("seed", range(60))
async def test_no_fault_in_parts_becomes_a_page(seed: int) -> None:
    rng = random.Random(seed)
    tier = MemoryTier(1 << 20)
    await spilled(tier)
    rewritten = parts_of(tier, 1)
    here, there = await spilled(tier), make_pages(2)
    before = parts_of(tier, 1)
    assert [old == new for old, new in zip(rewritten, before, strict=True)] == [False] * 4, (
        "two writings are told apart"
    )
    tier._values[name(1, 1)] = tuple(spoil(rng, before, parts_of(tier, 3), rewritten))
    ack = await MoverHarness(there, tier, LIMITS).fetch(transfer(2, IDS, HOLES))
    assert ack.num_done == 1 and ack.status in (TransferStatus.CORRUPT, TransferStatus.MISSING)
    assert page(there, 0, 1) == page(here, 0, 1), "what came before it counts"
    await spilled(tier)
    assert (await MoverHarness(there, tier, LIMITS).fetch(transfer(3, IDS, HOLES))).status is TransferStatus.DONE
    assert page(there, 1, 6) == page(here, 1, 6)


@pytest.mark.parametrize("seed", range(20))
async def test_a_store_that_fails_between_parts_makes_nothing_findable(seed: int) -> None:
    """Faults as pages are written, then as they are read: what is acknowledged is right."""
    inner = MemoryTier(1 << 20)
    here, there = make_pages(1), make_pages(2)
    plan = FaultPlan(seed, fail=0.2, partial=0.1, lose=0.1, corrupt=0.1)
    ack = await MoverHarness(here, FaultyTier(inner, plan), LIMITS).spill(transfer(1, IDS, HOLES))
    found = await MoverHarness(there, inner, LIMITS).fetch(transfer(2, IDS, HOLES))
    assert found.num_done >= ack.num_done
    fetched = await MoverHarness(there, FaultyTier(inner, plan), LIMITS).fetch(transfer(3, IDS, HOLES))
    for arrived in (found, fetched):
        for at in range(arrived.num_done):
            assert page(there, 0, IDS[0][at]) == page(here, 0, IDS[0][at])
            if (1, at) not in HOLES:
                assert page(there, 1, IDS[1][at]) == page(here, 1, IDS[1][at])


async def test_a_store_that_ends_early_has_no_such_page() -> None:
    class Hasty(MemoryTier):
        """Breaks its contract: it says nothing of a part that it does not yield."""

        def get_parts(self, key: bytes, num_parts: int, max_bytes: int) -> Generator[bytearray | None, None, None]:
            yield from islice(super().get_parts(key, num_parts, max_bytes), num_parts - 1)

    tier = Hasty(1 << 20)
    await spilled(tier)
    ack = await MoverHarness(make_pages(2), tier, LIMITS).fetch(transfer(2, IDS, HOLES))
    assert ack[:3] == (2, 1, TransferStatus.MISSING)


async def test_a_full_store_takes_no_half_of_a_snapshot() -> None:
    tier = MemoryTier(1500)  # three small pages, and less than a snapshot
    ack = await MoverHarness(make_pages(1), tier, LIMITS).spill(transfer(1, IDS, HOLES))
    assert ack[:3] == (1, 1, TransferStatus.FAILED)
    assert name(1, 1) not in tier._values


async def test_parts_wait_for_the_launches_before_they_are_written() -> None:
    tier = MemoryTier(1 << 20)
    await spilled(tier)
    there = make_pages(2)
    before = page(there, 1, 6)
    seen: list[bool] = []
    harness = MoverHarness(there, tier, LIMITS)
    harness.mover.fetch(transfer(2, IDS, HOLES), lambda: seen.append(page(there, 1, 6) == before))
    await harness.mover.drain()
    assert harness.acks[0].status is TransferStatus.DONE
    assert seen[0], "a part was written before the barrier was asked"
