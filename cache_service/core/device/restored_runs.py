"""The runs of a worker's inventory that are in the tree already, by number: where the runs behind them begin."""

from __future__ import annotations

from typing import NamedTuple

from cache_service.core.base.cleared_scopes import MAX_SCOPES
from cache_service.core.device.radix_node import Node
from session.errors import InvalidInput, TooMany
from session.messages import Forget
from session.words import Namespace


class RunEnd(NamedTuple):
    """The run ends at page number `end`, in `node` or, after splits, in an ancestor of it."""

    node: Node
    end: int


class RestoredRuns:
    """Of one generation, until the inventory is complete. `max_runs` bounds how many are remembered."""

    def __init__(self, max_runs: int) -> None:
        self.is_open = True
        self.is_complete = False  # all that the worker brought is here
        self._max_runs = max_runs
        self._last_run = 0
        self._ends: dict[int, RunEnd | None] = {}  # None: evicted since
        self._runs_of: dict[Node, list[int]] = {}
        self._cleared: set[Namespace] = set()
        self._is_all_cleared = False

    def __len__(self) -> int:
        return len(self._ends)

    def begin(self, run: int) -> None:
        """Raises InvalidInput, TooMany for a run that may not come now."""
        if not self.is_open:
            raise InvalidInput("run", f"{run} comes after the inventory's end")
        if run <= self._last_run:
            raise InvalidInput("run", f"{run} comes after {self._last_run}")
        if len(self._ends) >= self._max_runs:
            raise TooMany("run", f"more than {self._max_runs} runs")
        self._last_run = run

    def add(self, run: int, node: Node, end: int) -> None:
        self._ends[run] = RunEnd(node, end)
        self._runs_of.setdefault(node, []).append(run)

    def knows(self, run: int) -> bool:
        return run in self._ends

    def find(self, run: int) -> RunEnd | None:
        """Returns where a known run ends; None where it was evicted, though its node may have grown again since."""
        return self._ends[run]

    def was_cut(self, node: Node) -> None:
        """The node lost its last pages. After a split the runs that end in its upper half are kept under the lower one,
        which is cut off before it."""
        runs = self._runs_of.get(node)
        if runs is None:
            return
        kept = []
        for run in runs:
            found = self._ends[run]
            if found is not None and node.resident and found.end <= node.end:
                kept.append(run)
            else:
                self._ends[run] = None
        if kept:
            self._runs_of[node] = kept
        else:
            del self._runs_of[node]

    def is_cleared(self, namespace: Namespace) -> bool:
        return self._is_all_cleared or namespace in self._cleared

    def clear(self, namespace: Namespace | None) -> None:
        """A Clear call: what comes of the namespace from now on may be older than it; None: of any.

        Beyond MAX_SCOPES namespaces all count as cleared: a worker without an inventory never completes it.
        """
        if namespace is not None and self.is_open:
            self._cleared.add(namespace)
        if namespace is None or len(self._cleared) > MAX_SCOPES:
            self._is_all_cleared = True
            self._close()

    def clear_missed(self, missed: Forget | None) -> None:
        """The Clear calls that came while the worker had no state."""
        if missed is not None:
            for namespace in (None,) if missed.everything else missed.namespaces:
                self.clear(namespace)

    def complete(self) -> None:
        """Nothing older follows: sequences are adopted before the inventory comes."""
        self.is_complete = True
        self._close()

    def _close(self) -> None:
        self.is_open = False
        self._ends.clear()
        self._runs_of.clear()
        self._cleared.clear()
