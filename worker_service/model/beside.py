"""A second stream in captured launches: parts of a layer that do not need each other's results run at the same time.

Few tokens leave most of a GPU idle: choosing experts for 16 tokens takes 20 us on an H200, in which the shared expert,
15 us, can be computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """What is launched in a `with beside():` block may run at the same time as what is launched behind the block, until
    `join`. A block within a block, and its `join`, are a part of the outer one.

    Only in captured launches: elsewhere the device is faster than the host launches, and everything is on one stream.
    Blocks run in order, each behind all that was launched before it. So memory that a block allocated is not taken
    again before what read it behind `join` has ended.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._is_open = False
        self._has_begun = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        stream = self._stream
        if stream is None or self._is_open or not torch.cuda.is_current_stream_capturing():
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._is_open = self._has_begun = True
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._is_open = False

    def join(self) -> None:
        """What is launched from here on reads what the block wrote."""
        if self._stream is not None and self._has_begun and not self._is_open:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._has_begun = False
