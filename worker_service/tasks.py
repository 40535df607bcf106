"""Tasks that nobody awaits while they run: one that fails has to be noticed by something that goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

_log = logging.getLogger(__name__)


def watched(
    work: Coroutine[None, None, None], name: str, on_failure: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """Returns a task that does the work; `on_failure` gets the exception that ends it, if it is not cancelled."""

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("the task %s has failed", name, exc_info=error)
            on_failure(error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task
