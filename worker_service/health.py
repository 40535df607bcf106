"""What health checks are told: SERVING from the first session until the drain. While a session is lost, requests queue.

A process whose device is lost ends for certain, so that something can start it anew.
"""

from __future__ import annotations

import logging
import os
import threading

from rpc.health import NOT_SERVING, SERVING, Health
from worker_service.core.errors import DeviceLost
from worker_service.engine import Engine

# Enough for the calls' last responses and a Goodbye.
LOST_DEVICE_EXIT_S = 10.0

_log = logging.getLogger("worker_service")


async def follow_health(engine: Engine, health: Health) -> None:
    """Keeps the health right until the drain, which the engine's end begins as well."""
    await engine.connected.wait()
    await health.set_all(SERVING)
    await engine.draining.wait()
    await health.set_all(NOT_SERVING)
    if isinstance(engine.fault, DeviceLost):
        _end_process_within(LOST_DEVICE_EXIT_S)


def _end_process_within(seconds: float) -> None:
    """Ends the process with code 1 after that time: threads that wait for a lost device may never return."""

    def end() -> None:
        _log.error("the process did not end within %g s after the loss of the device", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
