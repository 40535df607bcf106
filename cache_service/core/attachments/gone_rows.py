"""Why a row that was there is there no more: hints, in a table of fixed size, by which a Lookup says why pages miss."""

from __future__ import annotations

from cache_service.core.device.ghost_table import GhostKind, GhostTable, mark_of
from cache_service.core.host.hash_index import DropListener, HashIndex
from session.words import MissReason

# 2 MiB for each store that engines are attached to.
REMEMBERED_ROWS = 262_144


class GoneRows(DropListener):
    def __init__(self) -> None:
        self._ghosts = GhostTable(REMEMBERED_ROWS, REMEMBERED_ROWS)

    def dropped(self, key: bytes, is_cleared: bool) -> None:
        self._ghosts.add(mark_of(key, 0, b""), GhostKind.CLEARED if is_cleared else GhostKind.ONCE, 1)

    def why(self, key: bytes) -> MissReason:
        """Why there is no such row."""
        ghost = self._ghosts.find(mark_of(key, 0, b""))
        if ghost is None:
            return MissReason.NEVER_SEEN
        return MissReason.CLEARED if ghost.kind is GhostKind.CLEARED else MissReason.EVICTED


def why_gone(index: HashIndex, key: bytes) -> MissReason:
    """Why the tier has no such row. It remembers from the first attachment on."""
    listener = index.drop_listener
    return listener.why(key) if isinstance(listener, GoneRows) else MissReason.NEVER_SEEN
