"""Learns which host tier this worker reaches, and notices when it becomes another one.

The store is asked in a thread, so that one that is down does not block the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from session.words import HostTierKind
from tier_client.errors import HostTierError
from worker_service.core.ports import HostTier

PERIOD_S = 2.0
UNKNOWN = "the host tier does not say who it is: %s"
_log = logging.getLogger(__name__)


class TierFacts(NamedTuple):
    kind: HostTierKind
    identity: str


NO_TIER = TierFacts(HostTierKind.NONE, "")


class TierWatch:
    """`facts` is NO_TIER until the store has replied once; a store that stops replying keeps its identity."""

    def __init__(self, tier: HostTier | None, period_s: float = PERIOD_S) -> None:
        self._tier = tier
        self._period_s = period_s
        self._reason = ""  # why the store was not known at the last look
        self.facts = NO_TIER

    async def refresh(self) -> bool:
        """Asks the store once. Returns True when the facts have changed."""
        if self._tier is None:
            return False
        try:
            identity = await asyncio.to_thread(self._tier.identity)
        except HostTierError as error:
            # Warned of once: the store is asked again and again, and a reason that stays needs somebody's hand.
            _log.log(logging.DEBUG if str(error) == self._reason else logging.WARNING, UNKNOWN, error)
            self._reason = str(error)
            return False
        self._reason = ""
        before, self.facts = self.facts, TierFacts(self._tier.kind, identity)
        return self.facts != before

    async def run(self, on_change: Callable[[], None]) -> None:
        """Checks every `period_s` until cancelled."""
        while self._tier is not None:
            await asyncio.sleep(self._period_s)
            if await self.refresh():
                _log.info("the host tier has another identity now")
                on_change()
