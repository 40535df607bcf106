"""What the engine tells whoever measures it.

Knows no metric; the default listens to nothing.
"""

from __future__ import annotations

from worker_service.core.sequence import Timing, Usage


class Observer:
    """Overridden by metrics; called in the event loop, must not block."""

    def stepped(self, seconds: float) -> None: ...

    def launched(self, num_tokens: int, seconds: float) -> None: ...

    def launch_failed(self) -> None: ...

    def finished(self, usage: Usage, timing: Timing) -> None: ...

    def failed(self) -> None: ...

    def aborted(self) -> None: ...

    def session_lost(self) -> None: ...
