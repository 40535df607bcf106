"""The cycle collector while the service serves: what existed before is frozen, full collections are rare."""

from __future__ import annotations

import asyncio
import gc

import pytest

from cache_service import bootstrap
from cache_service.config import load_config
from rpc.collector import LONG_LIVED, seldom_collected


def test_what_exists_is_frozen_until_the_end() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collected(LONG_LIVED):
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold() == LONG_LIVED
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


async def test_the_service_does_it_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    class Stop(asyncio.Event):
        async def wait(self) -> bool:  # type: ignore[override]
            seen.append(gc.get_threshold())
            return True

    monkeypatch.setattr(bootstrap, "stop_event", Stop)
    addresses = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--metrics-listen", ""]
    before = gc.get_threshold()
    await bootstrap.serve(load_config(addresses, {}), lambda line: None)
    assert seen == [LONG_LIVED]
    assert gc.get_threshold() == before
