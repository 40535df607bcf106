"""Worlds with a host tier for the acceptance cases: a worker that joins one, spills to it, and forgets its pages."""

from __future__ import annotations

from typing import Any

from cache_service.core.base.types import FetchPolicy, SpillPolicy
from session.words import GroupSpec, HostTierKind
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import span
from tests.core.world import ABORTED, World


def stage(**config: Any) -> World:
    options = {"spill": SpillPolicy.WRITE_THROUGH, "fetch": FetchPolicy.ALWAYS, "watch": True}
    return World(**(options | config))


def join(world: World, *groups: GroupSpec, page: int = 2, name: str = "w0", tier: str = "redis") -> FakeWorker:
    return FakeWorker(world, groups, page, name, host_tier=HostTierKind.SHARED, host_tier_id=tier)


def spill(worker: FakeWorker) -> None:
    worker.world.tick()
    worker.spill_all()


def churn(worker: FakeWorker) -> None:
    """Push everything that is not held off the device, and let nothing of it reach the host tier."""
    pages = min(spec.num_pages for spec in worker.groups if spec.kind != 3)
    live = worker.start([7000 + i for i in range(pages * worker.page_tokens)])
    worker.launch(live)
    worker.release(live, ABORTED)


def warm(world: World, *groups: GroupSpec, tokens: list[int] | None = None) -> FakeWorker:
    """One prompt of eight tokens in the host tier and nothing on the device."""
    worker = join(world, *groups)
    worker.run(tokens or span(1, 8))
    spill(worker)
    churn(worker)
    assert world.tokens_cached([*span(1, 8), 9, 10]) == 0
    return worker
