"""Which host tier a worker says it has: none until it answers, the same while it is silent, another after a flush."""

from __future__ import annotations

import asyncio

import pytest

from session.words import HostTierKind
from tier_client.errors import HostTierError
from worker_service.host_tier.memory import MemoryTier
from worker_service.tier_watch import NO_TIER, TierFacts, TierWatch


class Named(MemoryTier):
    """Answers what it is told to answer, or nothing."""

    def __init__(self) -> None:
        super().__init__(1)
        self.name = ""

    def identity(self) -> str:
        if not self.name:
            raise HostTierError("does not answer")
        return self.name


async def test_the_facts_follow_the_store() -> None:
    tier = Named()
    watch = TierWatch(tier)
    assert not await watch.refresh()
    assert watch.facts == NO_TIER
    tier.name = "a"
    assert await watch.refresh()
    assert not await watch.refresh()
    tier.name = ""
    assert not await watch.refresh()
    assert watch.facts == TierFacts(HostTierKind.PRIVATE, "a")
    tier.name = "b"
    assert await watch.refresh()
    assert watch.facts.identity == "b"


async def test_a_store_that_stays_unknown_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = Named()
    watch = TierWatch(tier)
    for name in ("", "", "a", ""):
        tier.name = name
        await watch.refresh()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["the host tier does not say who it is: does not answer"] * 2


async def test_a_change_is_told_once() -> None:
    tier = Named()
    told = asyncio.Event()
    changes: list[str] = []
    watch = TierWatch(tier, period_s=0.001)

    def on_change() -> None:
        changes.append(watch.facts.identity)
        told.set()

    task = asyncio.create_task(watch.run(on_change))
    tier.name = "a"
    await asyncio.wait_for(told.wait(), 20)
    await asyncio.sleep(0.02)
    task.cancel()
    assert changes == ["a"]


async def test_a_worker_without_a_tier_has_nothing_to_watch() -> None:
    watch = TierWatch(None)
    assert not await watch.refresh()
    await asyncio.wait_for(watch.run(lambda: None), 20)
    assert watch.facts == NO_TIER
