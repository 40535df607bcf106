"""What the engine measured: its latest spans, rates, and the file for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from session.messages import Ack
from session.words import TicketId, TransferStatus
from worker_service.rate_meter import RateMeter
from worker_service.trace import EngineTrace, Span


def test_only_the_last_spans_are_kept() -> None:
    trace = EngineTrace(max_spans=3)
    for number in range(5):
        trace.note(Span("step", number, 0.0, 0.0))
    assert [span.number for span in trace.spans()] == [2, 3, 4]


def test_the_file_is_what_trace_viewers_read(tmp_path: Path) -> None:
    trace = EngineTrace()
    trace.note(Span("launch", 1, 1.0, 1.5, 64))
    trace.write(tmp_path / "trace.json")
    (event,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (event["ph"], event["ts"], event["dur"], event["tid"]) == ("X", 1e6, 0.5e6, "launch")
    assert event["args"] == {"num_tokens": 64}


def test_rates_are_unknown_until_something_was_measured_and_then_move() -> None:
    meter = RateMeter()
    meter.launched(4, 64, 0.01)  # decode: says nothing about prefill
    meter.fetched(Ack(TicketId(1), 0, TransferStatus.FAILED))
    assert meter.rates() == (0.0, 0.0, 0.0)
    meter.launched(100, 100, 0.1)
    meter.fetched(Ack(TicketId(2), 4, TransferStatus.DONE, 1000, 0.5))
    meter.spilled(Ack(TicketId(3), 4, TransferStatus.DONE, 1000, 0.25))
    assert meter.rates() == (pytest.approx(1000.0), 2000.0, 4000.0)
    meter.launched(100, 100, 0.05)
    assert meter.rates().prefill_tokens_per_s == pytest.approx(1200.0)
