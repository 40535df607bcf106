"""Which rows of a host tier Clear calls hide, and from which namespaces.

A row's stamp numbers the additions to its tier. A Clear call hides every row of now: those up to the last stamp, its
*floor*. A row that a scan found may be of any namespace: it stays for the others, hidden from the cleared one, whose
prompts are the only ones that lead to its hash if it is theirs.
"""

from __future__ import annotations

from collections import OrderedDict

# Cleared namespaces that are remembered.
MAX_CLEARED = 4_096

NOTHING_HIDDEN = -1


class ClearedNamespaces:
    def __init__(self) -> None:
        self._floors: OrderedDict[bytes | None, int] = OrderedDict()  # by digest of a namespace; None: all

    @property
    def are_all(self) -> bool:
        """Returns whether all namespaces were cleared at once."""
        return None in self._floors

    def floor(self, digest: bytes) -> int:
        """Returns the stamp up to which rows are hidden from the namespace with this digest."""
        if not self._floors:
            return NOTHING_HIDDEN
        return max(self._floors.get(digest, NOTHING_HIDDEN), self._floors.get(None, NOTHING_HIDDEN))

    def hide(self, digest: bytes | None, floor: int) -> int:
        """Hides the rows up to a stamp from a namespace (None: from all). Returns the floor of the namespace that is
        forgotten for it, as there are too many; NOTHING_HIDDEN when there are not."""
        self._floors.pop(digest, None)
        self._floors[digest] = floor
        return self._floors.popitem(last=False)[1] if len(self._floors) > MAX_CLEARED else NOTHING_HIDDEN

    def clear(self) -> None:
        self._floors.clear()
