"""Passes the manager's effects on to what carries them out.

Events go to the watchers, keys of the host tier to the client that deletes and touches them there. Orders to workers,
spills and what a Clear call dropped (Forget), are not handled here: each worker's stream takes its own by
`CacheManager.take_orders`.
"""

from __future__ import annotations

from cache_service.core.cache_manager import CacheManager
from cache_service.host_keys import RedisHostKeys
from cache_service.watchers import Watchers


class EffectDispatcher:
    """Called after every verb that may have left something to do."""

    def __init__(self, manager: CacheManager, watchers: Watchers, host_keys: RedisHostKeys | None) -> None:
        self._manager = manager
        self._watchers = watchers
        self._host_keys = host_keys

    async def clear_begins(self) -> None:
        if self._host_keys is not None:
            await self._host_keys.clear_begins()

    def clear_ends(self, *, keep_marks: bool) -> None:
        if self._host_keys is not None:
            self._host_keys.clear_ends(keep_marks=keep_marks)

    def flush(self) -> None:
        if not self._manager.has_effects():
            return
        num_lost = self._manager.take_num_lost_events()
        if num_lost:
            self._watchers.lose(num_lost)
        events = self._manager.take_events()
        if events:
            self._watchers.tell(events)
        if self._host_keys is None:  # taken even so, or they would pile up
            self._manager.tiers.take_deletes()
            self._manager.tiers.take_touches()
        elif self._host_keys.has_room:
            if deletes := self._manager.tiers.take_deletes():
                self._host_keys.delete(deletes)
            if touches := self._manager.tiers.take_touches():
                self._host_keys.touch(touches)
