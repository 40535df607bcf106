"""Forbids every wait for the GPU that torch can notice, copies to the host among them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_device_waits() -> Iterator[None]:
    """A synchronising call inside raises RuntimeError."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch says of this mode that it does not see every wait; what it sees is what is tested.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
