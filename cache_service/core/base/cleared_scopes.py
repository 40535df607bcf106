"""What the Clear calls of this epoch dropped, so that workers can be told to forget it, also those that come later."""

from __future__ import annotations

from collections import OrderedDict

from session.messages import Forget
from session.words import Namespace

# Beyond this many namespaces a worker is told that everything was cleared: it forgets more than it must.
MAX_SCOPES = 1_024


class ClearedScopes:
    """`number` counts the Clear calls."""

    def __init__(self) -> None:
        self.number = 0
        self._everything = 0  # number of the last call that cleared all
        self._namespaces: OrderedDict[Namespace, int] = OrderedDict()  # number of the last call; numbers rise

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
