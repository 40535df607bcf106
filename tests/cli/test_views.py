"""Tables as a terminal of 80 or 100 columns shows them: nothing is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from cli.engine_explanation import engines_explained
from cli.engines import main_reason
from cli.explanation import explanation_view, span
from cli.output import table
from cli.rates import Rates
from cli.scene_table import scene_table
from cli.stage import SceneResult, Shown
from cli.views import Moment, live_view, stats_view
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
        states = worker.groups.add(
            name="state", kind=types_pb2.GROUP_KIND_STATE, num_pages=4096, num_evicted=12_345_678
        )
        states.num_snapshots_taken, states.num_snapshots_restored, states.limited_tokens = (
            12_345_678,
            1_234_567,
            98_765_432,
        )
        for reason in ("never_seen", "evicted", "page_tail", "no_snapshot", "window_gone"):
            worker.misses[reason] = 1_234_567
    tier = made.host_tier
    tier.num_rows, tier.num_bytes, tier.quota_bytes, tier.breaker_open = 123_456, 123 << 30, 999 << 30, True
    tier.num_spilled_pages = tier.num_fetched_pages = tier.num_missing_pages = 12_345_678
    tier.spill_policy, tier.fetch_policy = "write_through", "always"
    return made


def moment() -> Moment:
    rates = {"worker-1": Rates(12.5, 123_456.7, 65_432.1, 0.625), "worker-2": Rates()}
    return Moment(stats(), rates)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_status_is_whole_and_gives_the_reasons_of_misses(width: int) -> None:
    text = drawn(stats_view(moment()), width)
    for word in ("1,234,567", "98,765,432", "57.5%", "gone", "connected", "123.0 GiB", "12,345,678", "open"):
        assert word in text
    for word in ("never", "seen", "evicted", "page", "tail", "snapshot", "window"):
        assert word in text.split()
    assert text.index("worker-1") < text.index("worker-2")


@pytest.mark.parametrize("width", WIDTHS)
def test_attached_engines_have_a_table_where_there_are_any(width: int) -> None:
    seen = moment()
    assert "attached" not in drawn(stats_view(seen), width)
    stats = seen.stats.attachments
    stats.num_attachments, stats.num_lookups, stats.asked_pages, stats.usable_pages = 3, 45, 6_789, 4_321
    text = drawn(stats_view(seen), width)
    assert "engines attached to the host tier" in text and "6,789" in text and "4,321" in text
    assert "4,321" in drawn(stats_view(Moment(seen.stats)), width)
    for number, misses in enumerate([{"never_seen": 1_234_567, "none": 9_999_999}, {"none": 7}, {}], 101):
        one = stats.engines.add(
            attachment=number, engine="vllm 0.33.0", misses=misses, peer="ipv4:192.168.178.102:41234"
        )
        one.key_prefix = f"stemcache:1:{'0123456789abcdef' * 4}:"
        one.num_lookups, one.asked_pages, one.usable_pages = 11_234_567 * bool(misses), 98_765_432, 98_000_000
        one.fetched_pages = one.committed_pages = one.refused_pages = one.given_up_pages = 98_765_432
    shown = drawn(stats_view(seen), width).split()
    for word in (
        "never",
        "1,234,567",
        "102",
        "lookup",
        "103",
        "99.2%",
        "98,765,432",
        "192.168.178.102:41234;",
        "0123456789ab",
    ):
        assert word in shown, word
    assert "101" in live(80, seen).split()
    for _ in range(20):
        stats.engines.add(attachment=200)
    assert "and 7 more: --json has them" in " ".join(drawn(stats_view(seen), width).split())


def test_a_hit_rate_of_nothing_has_a_reason() -> None:
    cases = {"refused: 3": {"refused": 3, "none": 9}, "no whole page asked": {"none": 2}}
    for reason, misses in cases.items():
        one = cache_pb2.AttachedEngine(num_lookups=12, misses=misses)
        assert main_reason(one) == reason


def test_a_status_without_workers_says_so() -> None:
    assert "no worker is known" in drawn(stats_view(Moment(cache_pb2.StatsResponse(policy="lru"))), 80)


def live(height: int, seen: Moment) -> str:
    return drawn(live_view(seen, Console(file=io.StringIO(), width=80, height=height)), 80)


@pytest.mark.parametrize("height", [10, 24, 36, 50, 60])
def test_the_live_view_fits_the_terminal_and_says_what_does_not(height: int) -> None:
    text = live(height, moment())
    assert len(text.splitlines()) <= height
    assert text.count("policy priority") == 1
    assert "12.5" in text and "62%" in text
    assert ("window" in text) == (height >= 50)
    assert ("on a taller terminal" in text) == (height < 50)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_silent_cache_service_is_no_gone_worker(width: int) -> None:
    text = drawn(stats_view(moment()._replace(silent_since="10:07:14", address="127.0.0.1:7400")), width)
    assert "127.0.0.1:7400 gives no reply since 10:07:14" in " ".join(text.split())
    assert "connected" in text


def test_pins_kept_prompts_and_corrupt_pages_show_where_there_are_any() -> None:
    seen = moment()
    for text in (drawn(stats_view(seen), 80), live(60, seen)):
        assert "pinned" not in text and "kept" not in text and "checks" not in text
    one = next(worker for worker in seen.stats.workers if worker.worker_id == "worker-1")
    one.pinned_tokens, one.kept_bytes, one.matched_tokens = 96, 3 << 20, one.cached_tokens + 1_234
    seen.stats.host_tier.num_corrupt_pages = 7
    for text in (drawn(stats_view(seen), 80), live(60, seen)):
        flat = " ".join(text.split())
        assert "worker-1: 96 tokens are pinned; 3.0 MiB of prompts are kept for their next try; 1,234 prompt" in flat
        assert "host tier: 7 pages failed their checks" in flat


def test_spans_have_the_unit_that_fits() -> None:
    assert [span(seconds) for seconds in (0.4, 119, 120, 3600, 7200)] == ["0 s", "119 s", "2 min", "60 min", "2 h"]


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


def test_an_explanation_says_where_nothing_is_fetched() -> None:
    made = explained(("worker-1", 48, 16))
    made.workers[0].match.miss_reason = types_pb2.MISS_REASON_FETCH_SLOWER
    text = drawn(explanation_view(81, made), 120)
    assert "48 are there, 16 are in the host tier, and computed sooner" in text


def test_an_explanation_starts_with_the_best_worker() -> None:
    text = drawn(explanation_view(81, explained(("worker-1", 0, 16), ("worker-2", 48, 16))), 80)
    assert "81 prompt tokens; best on worker-2: 48 are there, 16 can be fetched" in text
    assert text.index("worker-2 ") < text.index("worker-1 ")
    lines = [line.split() for line in text.splitlines()]
    assert ["worker-2", "0", "..", "47", "device", "48"] in lines
    assert ["48", "..", "63", "host", "tier", "16"] in lines
    assert ["64", "..", "80", "missing", "never", "seen", "17"] in lines
    assert "worker-2: Only whole pages are reused." in text


def test_among_equals_the_device_comes_before_the_host_tier() -> None:
    text = drawn(explanation_view(81, explained(("worker-1", 0, 64), ("worker-2", 64, 0))), 80)
    assert "best on worker-2: 64 are there" in text


def test_an_explanation_says_what_is_pinned() -> None:
    seen = explained(("worker-1", 48, 0))
    assert "pinned" not in drawn(explanation_view(81, seen), 80)
    seen.workers[0].pinned_tokens, seen.workers[0].pin_left_ms = 32, 59 * 60_000
    assert "worker-1: the first 32 tokens are pinned, for 59 min more" in drawn(explanation_view(81, seen), 80)


def test_an_explanation_says_when_pages_were_used_and_when_they_went() -> None:
    seen = explained(("worker-1", 48, 0), ("worker-2", 48, 0), ("worker-3", 0, 0))
    ages = {"worker-1": (0, 0), "worker-2": (42_000, 42_400)}
    for one in seen.workers:
        if one.worker_id in ages:
            one.segments[0].last_used.least_ms, one.segments[0].last_used.most_ms = ages[one.worker_id]
            one.segments[0].last_used.SetInParent()
    for at, (least, most) in enumerate(((120_000, 180_000), (0, 7_200_000), (90_000, 90_000))):
        gone = seen.workers[at].segments[-1].gone
        gone.least_ms, gone.most_ms = least, most
    text = " ".join(drawn(explanation_view(81, seen), 120).split())
    assert "device in use 48" in text and "device used 42 s ago 48" in text
    assert "never seen went 2 min to 3 min ago 17" in text
    assert "went at most 2 h ago" in text and "went 90 s ago" in text


def test_an_explanation_of_nothing() -> None:
    assert "no worker can reuse any" in drawn(explanation_view(17, explained(("worker-1", 0, 0))), 80)
    assert "no worker of this model" in drawn(explanation_view(17, cache_pb2.ExplainResponse()), 80)


def test_a_table_keeps_its_numbers_whole_and_wraps_its_text() -> None:
    made = table("", ("what", "count"), [("word " * 40, "1,234,567,890")])
    assert "1,234,567,890" in drawn(made, 80)


def engine_explanation() -> cache_pb2.AttachmentExplanation:
    told = cache_pb2.AttachmentExplanation(attachment=12_345, engine="vllm [0.33.0]", num_pages=16_384, page_tokens=16)
    told.local_pages, told.matched_pages, told.usable_pages, told.usable_tokens = 3, 16_380, 16_000, 256_000
    told.limiting_group, told.miss_reason = "window1", types_pb2.MISS_REASON_WINDOW_GONE
    kinds = types_pb2.GROUP_KIND_FULL, types_pb2.GROUP_KIND_WINDOW, types_pb2.GROUP_KIND_STATE
    for name, kind, usable in zip(("full0", "window1", "state2"), kinds, (16_380, 16_000, 16_380), strict=True):
        group = told.groups.add(name=name, kind=kind, leading_pages=16_380, resident_pages=16_384, usable_pages=usable)
        group.miss_reason, group.replicated = types_pb2.MISS_REASON_NONE, name == "full0"
    for group in told.groups[:2]:
        group.missing_page, group.miss_reason = group.usable_pages, types_pb2.MISS_REASON_NOT_WRITTEN
    told.notes.append(LONG_NOTE)
    return told


@pytest.mark.parametrize("width", WIDTHS)
def test_what_an_engine_could_resume_is_told_for_each_group(width: int) -> None:
    told = engine_explanation()
    flat = " ".join(drawn(engines_explained([told, told]), width).split())
    head = "attachment 12345 (vllm [0.33.0]): 16,384 pages of 16 tokens; 16,000 (256,000 tokens) can be used"
    assert flat.count(f"{head}, limited by group window1") == 2
    assert "not written 16,000 16,380 16,384 16,000" in flat
    assert "state2 state 16,380 16,384 16,380" in flat and "replicated" in flat
    told.lookup_age_ms = 90_000
    flat = " ".join(drawn(engines_explained([told]), width).split())
    assert "its lookup of 90 s ago, 16,384 pages, 3 of them its own, of 16 tokens" in flat
    told.local_pages = 0
    flat = " ".join(drawn(engines_explained([told]), width).split())
    assert "its lookup of 90 s ago, 16,384 pages of 16 tokens; 16,000" in flat
    assert drawn(engines_explained([]), width) == "no engine is attached\n"
