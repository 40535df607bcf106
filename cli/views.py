"""How answers of the cache service look on a terminal, of 80 columns and more.

Knows messages only; asks nobody.
"""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType

from cli.client import Answer
from cli.output import binary_size, plain, stacked, table
from protos.v1 import cache_pb2, types_pb2

NO_WORKER = "no worker is known to the cache service"


def stats_view(stats: cache_pb2.StatsResponse) -> RenderableType:
    """The whole status as tables: workers, their tokens, misses and pools, the host tier."""
    workers = _sorted(stats)
    if not workers:
        return stacked((_heading(stats), NO_WORKER, _host_table(stats.host_tier)))
    views = [_workers_table(stats, workers), _tokens_table(workers), *_misses_table(workers), _pools_table(workers)]
    return stacked((*views, _host_table(stats.host_tier)))


def live_view(stats: cache_pb2.StatsResponse, console: Console) -> RenderableType:
    """What of the status fits the terminal's height: what moves most comes first, and no table is cut."""
    workers = _sorted(stats)
    tables = [_tokens_table(workers), _pools_table(workers), _host_table(stats.host_tier)]
    tables += [_workers_table(stats, workers), *_misses_table(workers)]
    shown: list[RenderableType] = [_heading(stats) if workers else f"{_heading(stats)} · {NO_WORKER}"]
    room = console.height - 3
    for one in tables:
        room -= len(console.render_lines(one, pad=False)) + 1
        if room < 0:
            break
        shown.append(one)
    return stacked(shown)


def _sorted(stats: cache_pb2.StatsResponse) -> list[cache_pb2.WorkerStats]:
    return sorted(stats.workers, key=lambda worker: worker.worker_id)


def _heading(stats: cache_pb2.StatsResponse) -> str:
    return f"workers · policy {plain(stats.policy)} · {time.strftime('%H:%M:%S')}"


def _workers_table(stats: cache_pb2.StatsResponse, workers: list[cache_pb2.WorkerStats]) -> RenderableType:
    rows = [
        (
            plain(w.worker_id),
            plain(w.endpoint),
            "connected" if w.connected else "[red]gone[/red]",
            *(f"{n:,}" for n in (w.num_leases, w.num_tickets, w.num_refusals, w.num_nodes)),
        )
        for w in workers
    ]
    columns = ("worker", "endpoint", "session", "leases", "tickets", "refusals", "nodes")
    return table(_heading(stats), columns, rows, left=3)


def _tokens_table(workers: list[cache_pb2.WorkerStats]) -> RenderableType:
    rows = []
    for w in workers:
        saved = w.cached_tokens + w.fetched_tokens
        counts = (w.num_requests, w.prompt_tokens, w.cached_tokens, w.fetched_tokens, w.computed_tokens)
        rate = f"{saved / w.prompt_tokens:.1%}" if w.prompt_tokens else "-"
        rows.append((plain(w.worker_id), *(f"{n:,}" for n in counts), rate))
    columns = ("worker", "requests", "prompt", "cached", "fetched", "computed", "hit rate")
    return table("tokens of prompts", columns, rows)


def _misses_table(workers: list[cache_pb2.WorkerStats]) -> list[RenderableType]:
    """Why the rest of a prompt was not reused, counted in requests; no table before the first request."""
    reasons = sorted({reason for worker in workers for reason in worker.misses})
    if not reasons:
        return []
    rows = [(plain(w.worker_id), *(f"{w.misses.get(reason, 0):,}" for reason in reasons)) for w in workers]
    columns = ("worker", *(reason.replace("_", "\n") for reason in reasons))
    return [table("requests, by why the rest of the prompt missed", columns, rows)]


def _pools_table(workers: list[cache_pb2.WorkerStats]) -> RenderableType:
    rows = [
        (
            plain(w.worker_id),
            plain(g.name),
            *(f"{n:,}" for n in (g.num_pages, g.num_free, g.num_evictable, g.num_evicted)),
        )
        for w in workers
        for g in w.groups
    ]
    return table("pages", ("worker", "group", "all", "free", "evictable", "evicted so far"), rows, left=2)


def _host_table(tier: cache_pb2.HostTierStats) -> RenderableType:
    row = (
        "[red]open[/red]" if tier.breaker_open else "closed",
        f"{tier.num_rows:,}",
        binary_size(tier.num_bytes),
        binary_size(tier.quota_bytes),
        f"{tier.num_spilled_pages:,}",
        f"{tier.num_fetched_pages:,}",
        f"{tier.num_missing_pages:,}",
    )
    columns = ("breaker", "rows", "size", "quota", "spilled\npages", "fetched\npages", "missing\npages")
    title = f"host tier · spill {plain(tier.spill_policy)} · fetch {plain(tier.fetch_policy)}"
    return table(title, columns, [row])


def explanation_view(num_tokens: int, explained: cache_pb2.ExplainResponse) -> RenderableType:
    """Where each stretch of the prompt is on each worker, the best worker first."""
    if not explained.workers:
        return "no worker of this model is known to the cache service"
    workers = sorted(explained.workers, key=lambda one: (-_within_reach(one), one.worker_id))
    rows = [row for one in workers for row in _stretches(one)]
    title = f"{num_tokens:,} prompt tokens; {_verdict(workers[0])}"
    notes = [f"{plain(one.worker_id)}: {plain(note)}" for one in workers for note in one.notes]
    return Group(table(title, ("worker", "tokens", "where", "why not", "count"), rows, left=4), "", *notes)


def _within_reach(one: cache_pb2.WorkerExplanation) -> int:
    return one.match.usable_tokens + one.match.host_tokens


def _verdict(best: cache_pb2.WorkerExplanation) -> str:
    if not _within_reach(best):
        return "no worker can reuse any"
    there = f"{best.match.usable_tokens:,} are there"
    fetched = f", {best.match.host_tokens:,} can be fetched" if best.match.host_tokens else ""
    return f"best on {plain(best.worker_id)}: {there}{fetched}"


def _stretches(one: cache_pb2.WorkerExplanation) -> list[tuple[str, ...]]:
    return [
        (
            plain(one.worker_id) if at == 0 else "",
            f"{segment.first_token:,} .. {segment.first_token + segment.num_tokens - 1:,}",
            _residence(segment.residence),
            _reason(segment.miss_reason) if segment.residence == cache_pb2.RESIDENCE_MISSING else "",
            f"{segment.num_tokens:,}",
        )
        for at, segment in enumerate(one.segments)
    ]


def _residence(residence: cache_pb2.Residence.ValueType) -> str:
    word = words(cache_pb2.Residence.Name(residence), "RESIDENCE_")
    return {"device": "[green]device[/green]", "host": "[cyan]host tier[/cyan]"}.get(word, word)


def _reason(reason: types_pb2.MissReason.ValueType) -> str:
    return words(types_pb2.MissReason.Name(reason), "MISS_REASON_")


def words(name: str, prefix: str) -> str:
    """An enum's value as words: MISS_REASON_PAGE_TAIL is "page tail"."""
    return name.removeprefix(prefix).lower().replace("_", " ")


def counts_line(answer: Answer) -> str:
    """Where the prompt's tokens came from, and how soon the first new one was there."""
    usage = answer.usage
    return (
        f"[dim]{usage.prompt_tokens:,} prompt tokens: {usage.cached_tokens:,} cached, "
        f"{usage.fetched_tokens:,} fetched, {usage.computed_tokens:,} computed; "
        f"first token after {answer.first_token_s * 1e3:.0f} ms[/dim]"
    )
