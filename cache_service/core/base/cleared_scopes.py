"""What the Clear calls of this epoch dropped, so that workers can be told to forget it, also those that come later.

And which of them an incarnation has missed: what its sequences computed may be older than those, and is not published.
"""

from __future__ import annotations

from collections import OrderedDict

from session.messages import Forget
from session.words import Namespace, WorkerId

# Beyond this many namespaces a worker is told that everything was cleared: it forgets more than it must.
MAX_SCOPES = 1_024

# Incarnations without a state that are remembered; one that was forgotten has missed every call.
MAX_LEFT = 4_096


class ClearedScopes:
    """`number` counts the Clear calls."""

    def __init__(self) -> None:
        self.number = 0
        self._everything = 0  # number of the last call that cleared all
        self._namespaces: OrderedDict[Namespace, int] = OrderedDict()  # number of the last call; numbers rise
        self._left: OrderedDict[tuple[WorkerId, str], int] = OrderedDict()  # by incarnation: number of the last one met

    def add(self, namespace: Namespace | None) -> None:
        """Notes a call; None: of every namespace."""
        self.number += 1
        if namespace is not None:
            self._namespaces[namespace] = self.number
            self._namespaces.move_to_end(namespace)
        if namespace is None or len(self._namespaces) > MAX_SCOPES:
            self._everything = self.number
            self._namespaces.clear()

    def since(self, number: int) -> Forget | None:
        """Returns what was cleared after the call of that number; None: nothing."""
        if number >= self.number:
            return None
        named = tuple(namespace for namespace, last in self._namespaces.items() if last > number)
        return Forget(self.number, self._everything > number, named)

    def leave(self, worker_id: WorkerId, incarnation: str, number: int) -> None:
        """The incarnation's state is dropped; its sequences have met the calls up to that number."""
        self._left[worker_id, incarnation] = number
        if len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)

    def come_back(self, worker_id: WorkerId, incarnation: str) -> int:
        """Returns the number of the last call that the incarnation's sequences have met; 0 where that is not known."""
        return self._left.pop((worker_id, incarnation), 0)
