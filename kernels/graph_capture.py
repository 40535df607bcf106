"""The capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@contextmanager
def graph_capture(
    graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """As `torch.cuda.graph`, with the cyclic garbage collector switched off.

    The collector may free graphs that nobody holds any more, such as those of an earlier runner. CUDA forbids that
    during a capture, and the capture fails.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=capture_error_mode):
            yield
    finally:
        if was_enabled:
            gc.enable()
