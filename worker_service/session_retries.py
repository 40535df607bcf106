"""After a lost session: how long to pause before the next Hello, and when the unanswered step is at fault."""

from __future__ import annotations

import asyncio
import contextlib

from worker_service.core.errors import SessionLost, StepRejected, StepsRejected

# A step that ended this many sessions is void, and the next Hello begins anew.
REJECTIONS_OF_A_STEP = 2
# New states begun without a reply to any step between them, before the worker ends itself.
MAX_BEGINNINGS = 4
# The second loss in a row pauses for the shorter time, each further one for twice as long, up to the longer.
MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0


class SessionRetries:
    def __init__(self) -> None:
        self._num_lost = 0
        self._num_rejected = 0

    def reset(self) -> None:
        self._num_lost = self._num_rejected = 0

    def count(self, lost: SessionLost) -> bool:
        """Returns whether the unanswered step is to be given up, since it would end the next session, too.

        Raises StepsRejected when no step is taken at all: a worker that starts anew does not send the same steps."""
        self._num_lost += 1
        if not isinstance(lost, StepRejected):
            return False
        self._num_rejected += 1
        if self._num_rejected >= REJECTIONS_OF_A_STEP * MAX_BEGINNINGS:
            raise StepsRejected(f"{self._num_rejected} sessions were lost over one step: {lost}") from lost
        return self._num_rejected % REJECTIONS_OF_A_STEP == 0

    async def pause(self, stopping: asyncio.Event) -> None:
        """Waits before the next Hello, or until the worker stops."""
        doublings = min(self._num_lost - 2, 16)
        if doublings >= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(MIN_PAUSE_S * 2**doublings, MAX_PAUSE_S)):
                    await stopping.wait()
