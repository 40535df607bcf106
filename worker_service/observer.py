"""What the engine reports to its metrics.

The default does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker_service.core.sequence import Timing, Usage


class Observer:
    """Overridden by metrics; called in the event loop, must not block."""

    def stepped(self, seconds: float) -> None: ...

    def launched(self, num_tokens: int, busy_s: float, idle_s: float) -> None:
        """A launch ended. It kept the device busy for `busy_s`; before it the device waited `idle_s` for the host."""

    def launch_failed(self) -> None: ...

    def generated(self, num_tokens: int, inter_token_s: Sequence[float]) -> None:
        """New tokens of one launch, of whatever requests; and for those behind a first one the time since the last."""

    def finished(self, usage: Usage, timing: Timing) -> None: ...

    def failed(self, usage: Usage | None) -> None:
        """`usage` is what the request had used by then; None when it never ran."""

    def aborted(self, usage: Usage | None) -> None: ...

    def session_lost(self) -> None: ...

    def took_pages(self, num_pages: int) -> None:
        """Rows took pages by themselves, while the cache service did not reply."""
