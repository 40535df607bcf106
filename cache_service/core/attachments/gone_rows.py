"""Why a page is missing that was stored once, or was to be: hints, in a table of fixed size."""

from __future__ import annotations

from cache_service.core.device.ghost_table import mark_of
from cache_service.core.host.hash_index import DropListener, HashIndex
from session.words import MissReason

# 4 MiB for each store that engines are attached to, of which the system gives what was written.
_NUM_ENTRIES = 1 << 20
# An entry: 27 bits of the mark and a MissReason; 0 is empty.
_TAG_SHIFT, _REASON_BITS = 33, 5


class GoneRows(DropListener):
    """An entry for each group of a page. Its place follows from a hash, so a later one may overwrite it: after 200,000
    more four in five are left."""

    def __init__(self) -> None:
        self._entries = memoryview(bytearray(4 * _NUM_ENTRIES)).cast("I")

    def dropped(self, key: bytes, groups: int, why: MissReason) -> None:
        self.note(key, groups, why)

    def note(self, key: bytes, groups: int, why: MissReason) -> None:
        """Notes why these groups (a bit mask) of the page are missing; `key`: fingerprint and page hash."""
        group = 0
        while groups >> group:
            if groups >> group & 1:
                mark = mark_of(key, group, b"")
                self._entries[mark % _NUM_ENTRIES] = mark >> _TAG_SHIFT << _REASON_BITS | why
            group += 1

    def why(self, key: bytes, group: int) -> MissReason:
        """Returns the last reason that was noted."""
        mark = mark_of(key, group, b"")
        entry = self._entries[mark % _NUM_ENTRIES]
        if entry and entry >> _REASON_BITS == mark >> _TAG_SHIFT:
            return MissReason(entry & (1 << _REASON_BITS) - 1)
        return MissReason.NEVER_SEEN


def why_gone(index: HashIndex, key: bytes, group: int, floor: int) -> MissReason:
    """Returns why the tier does not have this group of a page; what went before the first attachment is not known."""
    row = index.rows.get(key)
    if row is not None and row.stamp <= floor:
        return MissReason.CLEARED
    listener = index.drop_listener
    return listener.why(key, group) if isinstance(listener, GoneRows) else MissReason.NEVER_SEEN


def note_gone(index: HashIndex, key: bytes, groups: int, why: MissReason) -> None:
    """Notes why these groups of a page were not written."""
    listener = index.drop_listener
    if isinstance(listener, GoneRows):
        listener.note(key, groups, why)
