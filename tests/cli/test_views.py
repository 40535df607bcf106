"""Tables as a terminal of 80 or 100 columns shows them: nothing is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from cli.output import table
from cli.scene_table import scene_table
from cli.stage import SceneResult, Shown
from cli.views import explanation_view, live_view, stats_view
from protos.v1 import cache_pb2, types_pb2

WIDTHS = (80, 100, 140)
LONG_NOTE = "a note that is longer than any terminal is wide, " * 4


def drawn(renderable: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text, text
    return text


def sentences() -> list[Shown]:
    answer = "The copper compass is kept in the north gallery, whose key hangs on hook 14."
    return [
        Shown("Which hook holds the key to the room of the copper compass?", answer, True, 98_765, 98_999),
        Shown("Where is [it]?", "Nowhere.", False, 0, 12),
    ]


def scenes() -> list[SceneResult]:
    numbers = {"requests": 8, "prompt": 98_765, "cached": 91_234, "fetched": 12_345, "computed": 23_456}
    title = "sibling of a request that still decodes"
    return [
        SceneResult(title, number=1, **numbers, cold_s=12.345, warm_s=0.0123, note=LONG_NOTE, shown=sentences()),
        SceneResult(title, number=2, skipped="no shared host tier"),
        SceneResult(title, number=3, same_answer=False, failures=["expected [16, 16], got 0"]),
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_scene_table_is_whole(width: int) -> None:
    text = drawn(scene_table(scenes(), width), width)
    for word in ("98,765", "91,234", "12,345", "23,456", "12,345 ms", "12 ms", "yes", "NO", "requests", "computed"):
        assert word in text
    words = text.split()
    assert words.count("sibling") == words.count("decodes") == 3
    assert "skipped: no shared host tier" in text
    assert "failed: expected [16, 16], got 0" in text
    for word in ("98,765 of 98,999", "0 of 12", "Where is [it]?", "Nowhere. (wrong)"):
        assert word in text
    assert words.count("gallery,") == words.count("14.") == 1


def stats() -> cache_pb2.StatsResponse:
    made = cache_pb2.StatsResponse(policy="priority")
    for name in ("worker-2", "worker-1"):
        worker = made.workers.add(worker_id=name, endpoint="127.0.0.1:65535", connected=name == "worker-1")
        worker.num_leases, worker.num_tickets, worker.num_refusals, worker.num_nodes = 4096, 64, 12_345, 1_234_567
        worker.num_requests, worker.prompt_tokens, worker.cached_tokens = 1_234_567, 98_765_432, 56_789_012
        worker.computed_tokens = 41_976_420
        worker.groups.add(
            name="full", num_pages=1_000_000, num_free=999_999, num_evictable=345_678, num_evicted=98_765_432
        )
        for reason in ("never_seen", "evicted", "page_tail", "no_snapshot", "window_gone"):
            worker.misses[reason] = 1_234_567
    tier = made.host_tier
    tier.num_rows, tier.num_bytes, tier.quota_bytes, tier.breaker_open = 123_456, 123 << 30, 999 << 30, True
    tier.num_spilled_pages = tier.num_fetched_pages = tier.num_missing_pages = 12_345_678
    tier.spill_policy, tier.fetch_policy = "write_through", "always"
    return made


@pytest.mark.parametrize("width", WIDTHS)
def test_the_status_is_whole_and_gives_the_reasons_of_misses(width: int) -> None:
    text = drawn(stats_view(stats()), width)
    for word in ("1,234,567", "98,765,432", "57.5%", "gone", "connected", "123.0 GiB", "12,345,678", "open"):
        assert word in text
    for word in ("never", "seen", "evicted", "page", "tail", "snapshot", "window"):
        assert word in text.split()
    assert text.index("worker-1") < text.index("worker-2")


def test_a_status_without_workers_says_so() -> None:
    assert "no worker is known" in drawn(stats_view(cache_pb2.StatsResponse(policy="lru")), 80)


@pytest.mark.parametrize("height", [10, 24, 40])
def test_the_live_view_fits_the_terminal(height: int) -> None:
    console = Console(file=io.StringIO(), width=80, height=height)
    text = drawn(live_view(stats(), console), 80)
    assert len(text.splitlines()) <= height
    assert "hit rate" in text
    assert ("window" in text) == (height == 40)


def explained(*workers: tuple[str, int, int]) -> cache_pb2.ExplainResponse:
    made = cache_pb2.ExplainResponse()
    for name, device, host in workers:
        one = made.workers.add(worker_id=name)
        one.match.usable_tokens, one.match.host_tokens = device, host
        for first, count, residence in (
            (0, device, cache_pb2.RESIDENCE_DEVICE),
            (device, host, cache_pb2.RESIDENCE_HOST),
        ):
            if count:
                one.segments.add(first_token=first, num_tokens=count, residence=residence)
        one.segments.add(
            first_token=device + host,
            num_tokens=17,
            residence=cache_pb2.RESIDENCE_MISSING,
            miss_reason=types_pb2.MISS_REASON_NEVER_SEEN,
        )
        one.notes.append("Only whole pages are reused.")
    return made


def test_an_explanation_starts_with_the_best_worker() -> None:
    text = drawn(explanation_view(81, explained(("worker-1", 0, 16), ("worker-2", 48, 16))), 80)
    assert "81 prompt tokens; best on worker-2: 48 are there, 16 can be fetched" in text
    assert text.index("worker-2 ") < text.index("worker-1 ")
    lines = [line.split() for line in text.splitlines()]
    assert ["worker-2", "0", "..", "47", "device", "48"] in lines
    assert ["48", "..", "63", "host", "tier", "16"] in lines
    assert ["64", "..", "80", "missing", "never", "seen", "17"] in lines
    assert "worker-2: Only whole pages are reused." in text


def test_an_explanation_of_nothing() -> None:
    assert "no worker can reuse any" in drawn(explanation_view(17, explained(("worker-1", 0, 0))), 80)
    assert "no worker of this model" in drawn(explanation_view(17, cache_pb2.ExplainResponse()), 80)


def test_a_table_keeps_its_numbers_whole_and_wraps_its_text() -> None:
    made = table("", ("what", "count"), [("word " * 40, "1,234,567,890")])
    assert "1,234,567,890" in drawn(made, 80)
