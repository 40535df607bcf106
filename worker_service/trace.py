"""When the engine's latest steps and launches ran.

Bounded: the oldest spans are forgotten.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Literal, NamedTuple

MAX_SPANS = 8192

Track = Literal["step", "launch"]


class Span(NamedTuple):
    track: Track
    number: int
    start_s: float
    end_s: float
    num_tokens: int = 0


class EngineTrace:
    """A ring of spans. Steps belong to the event loop, launches to the model's thread; both are noted by the loop."""

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=max_spans)

    def note(self, span: Span) -> None:
        self._spans.append(span)

    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    def write(self, path: Path) -> None:
        """The spans in the trace event format that browsers' trace viewers show."""
        events = [
            {
                "name": f"{span.track} {span.number}",
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "pid": 0,
                "tid": span.track,
                "args": {"num_tokens": span.num_tokens},
            }
            for span in self._spans
        ]
        path.write_text(json.dumps({"traceEvents": events}))
