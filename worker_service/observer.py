"""What the engine reports to its metrics.

The default does nothing.
"""

from __future__ import annotations

from worker_service.core.sequence import Timing, Usage


class Observer:
    """Overridden by metrics; called in the event loop, must not block."""

    def stepped(self, seconds: float) -> None: ...

    def launched(self, num_tokens: int, seconds: float) -> None: ...

    def launch_failed(self) -> None: ...

    def generated(self, num_tokens: int, since_last_s: float | None) -> None:
        """Tokens of one request, also if it is aborted later; `since_last_s` is None for its first ones."""

    def finished(self, usage: Usage, timing: Timing) -> None: ...

    def failed(self, usage: Usage | None) -> None:
        """`usage` is what the request had used by then; None when it never ran."""

    def aborted(self, usage: Usage | None) -> None: ...

    def session_lost(self) -> None: ...
