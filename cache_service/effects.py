"""Carries what the manager wants done in the world to those who do it.

Knows no decision: events go to the watchers, host keys to whoever deletes and touches them. Orders are not here; each
session takes its own when its peer can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache_service.core.cache_manager import CacheManager
from cache_service.watchers import Watchers


class HostKeys(Protocol):
    """Deletes and touches keys of the host tier in the background; neither call waits."""

    def delete(self, keys: Sequence[bytes]) -> None: ...

    def touch(self, keys: Sequence[bytes]) -> None: ...


class Effects:
    """Called after every verb that may have left something to do."""

    def __init__(self, manager: CacheManager, watchers: Watchers, host_keys: HostKeys | None) -> None:
        self._manager = manager
        self._watchers = watchers
        self._host_keys = host_keys

    def flush(self) -> None:
        num_lost = self._manager.take_num_lost_events()
        if num_lost:
            self._watchers.lose(num_lost)
        events = self._manager.take_events()
        if events:
            self._watchers.tell(events)
        # Taken even when there is nobody to carry them out, or they would pile up.
        deletes = self._manager.take_host_deletes()
        touches = self._manager.take_host_touches()
        if self._host_keys is None:
            return
        if deletes:
            self._host_keys.delete(deletes)
        if touches:
            self._host_keys.touch(touches)
