"""Formats responses of the cache service for a terminal of 80 columns and more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Console, RenderableType

from cli.client import Answer
from cli.engines import engine_places, engine_tables
from cli.output import binary_size, plain, stacked, table
from cli.rates import WINDOW_S, Rates
from protos.v1 import cache_pb2, types_pb2

NO_WORKER = "no worker is known to the cache service"


class Moment(NamedTuple):
    """One reading. `silent_since` is when the cache service at `address` stopped replying: the rest is from before."""

    stats: cache_pb2.StatsResponse
    rates: Mapping[str, Rates] = {}
    silent_since: str = ""
    address: str = ""


def stats_view(moment: Moment) -> RenderableType:
    """Returns the status as tables: workers, rates, their tokens, misses and pools, the host tier and other projects'
    engines that use it."""
    stats, workers = moment.stats, _sorted(moment.stats)
    tier = (_host_table(stats.host_tier), *engine_tables(stats.attachments), *engine_places(stats.attachments))
    if not workers:
        return stacked((_heading(moment), NO_WORKER, *tier))
    views = [_heading(moment), _workers_table(workers), *_rates_table(workers, moment.rates), _tokens_table(workers)]
    views += [*_remarks(stats, workers), *_misses_table(workers), _pools_table(workers), *_snapshots_table(workers)]
    return stacked((*views, *tier))


def live_view(moment: Moment, console: Console) -> RenderableType:
    """Returns what of the status fits the terminal's height: what changes most comes first, and no table is cut."""
    workers = _sorted(moment.stats)
    tables = [
        *_rates_table(workers, moment.rates),
        _tokens_table(workers),
        *_remarks(moment.stats, workers),
        *engine_tables(moment.stats.attachments),
        _pools_table(workers),
    ]
    tables += [_host_table(moment.stats.host_tier), _workers_table(workers), *_misses_table(workers)]
    shown: list[RenderableType] = [_heading(moment) if workers else f"{_heading(moment)} · {NO_WORKER}"]
    # Room for the heading and the note below.
    room = console.height - 4
    for at, one in enumerate(tables):
        room -= len(console.render_lines(one, pad=False)) + 1
        if room < 0:
            hidden = len(tables) - at
            shown.append(
                f"[dim]{hidden} more table{'s' * (hidden > 1)}: on a taller terminal, or `stemcache status`[/dim]"
            )
            break
        shown.append(one)
    return stacked(shown)


def _sorted(stats: cache_pb2.StatsResponse) -> list[cache_pb2.WorkerStats]:
    return sorted(stats.workers, key=lambda worker: worker.worker_id)


def _heading(moment: Moment) -> str:
    heading = f"workers · policy {plain(moment.stats.policy)} · {time.strftime('%H:%M:%S')}"
    if not moment.silent_since:
        return heading
    return f"{heading} · [red]{plain(moment.address)} gives no reply since {moment.silent_since}[/red]"


def _workers_table(workers: list[cache_pb2.WorkerStats]) -> RenderableType:
    rows = []
    for w in workers:
        session = "connected" if w.connected else "[red]gone[/red]"
        counts = (w.num_leases, w.num_tickets, w.num_refusals, w.num_nodes)
        rows.append((plain(w.worker_id), plain(w.endpoint), session, *counts))
    columns = ("worker", "endpoint", "session", "leases", "tickets", "refusals", "nodes")
    return table("sessions", columns, rows, left=3)


def _rates_table(workers: list[cache_pb2.WorkerStats], rates: Mapping[str, Rates]) -> list[RenderableType]:
    """Returns no table before the second reading."""
    if not rates:
        return []
    rows = []
    for w in workers:
        one = rates.get(w.worker_id, Rates())
        per_s = (f"{one.requests_per_s:,.1f}", f"{one.prompt_tokens_per_s:,.0f}", f"{one.computed_tokens_per_s:,.0f}")
        hits = "-" if one.hit_rate is None else f"{bar(one.hit_rate)} {one.hit_rate:4.0%}"
        held = _held_share(w)
        rows.append((plain(w.worker_id), *per_s, hits, f"{bar(held)} {held:4.0%}"))
    columns = ("worker", "requests/s", "tokens/s", "computed/s", "hit rate", "pages held")
    return [table(f"the last {WINDOW_S:.0f} s", columns, rows)]


def _held_share(worker: cache_pb2.WorkerStats) -> float:
    """Returns the share of pages that running sequences hold in the fullest pool."""
    shares = [1 - (g.num_free + g.num_evictable) / g.num_pages for g in worker.groups if g.num_pages]
    return max(0.0, *shares) if shares else 0.0


def bar(share: float) -> str:
    """Returns a bar of ten characters."""
    filled = round(min(max(share, 0.0), 1.0) * 10)
    return f"[green]{'█' * filled}[/green][dim]{'░' * (10 - filled)}[/dim]"


def _remarks(stats: cache_pb2.StatsResponse, workers: list[cache_pb2.WorkerStats]) -> list[RenderableType]:
    """Returns lines that are shown only when not empty.

    Pins, kept prompts, pages that were resident but not usable, or damaged.
    """
    lines = []
    for w in workers:
        parts = [f"{w.pinned_tokens:,} tokens are pinned"] if w.pinned_tokens else []
        parts += [f"{binary_size(w.kept_bytes)} of prompts are kept for their next try"] if w.kept_bytes else []
        unused = w.matched_tokens - w.cached_tokens - w.fetched_tokens
        parts += (
            [f"{unused:,} prompt tokens were resident and could not be used"] if w.matched_tokens and unused > 0 else []
        )
        lines += [f"{plain(w.worker_id)}: {'; '.join(parts)}"] if parts else []
    corrupt = stats.host_tier.num_corrupt_pages
    lines += [f"[red]host tier: {corrupt:,} pages failed their checks and were recomputed[/red]"] if corrupt else []
    return ["\n".join(lines)] if lines else []


def _tokens_table(workers: list[cache_pb2.WorkerStats]) -> RenderableType:
    rows = []
    for w in workers:
        saved = w.cached_tokens + w.fetched_tokens
        counts = (w.num_requests, w.prompt_tokens, w.cached_tokens, w.fetched_tokens, w.computed_tokens)
        rate = f"{saved / w.prompt_tokens:.1%}" if w.prompt_tokens else "-"
        rows.append((plain(w.worker_id), *counts, rate))
    columns = ("worker", "requests", "prompt", "cached", "fetched", "computed", "hit rate")
    return table("tokens of prompts", columns, rows)


def _misses_table(workers: list[cache_pb2.WorkerStats]) -> list[RenderableType]:
    """Returns the reasons of misses, counted in requests; no table before the first request."""
    reasons = sorted({reason for worker in workers for reason in worker.misses})
    if not reasons:
        return []
    rows = [(plain(w.worker_id), *(w.misses.get(reason, 0) for reason in reasons)) for w in workers]
    columns = ("worker", *(reason.replace("_", "\n") for reason in reasons))
    return [table("requests, by why the rest of the prompt missed", columns, rows)]


def _pools_table(workers: list[cache_pb2.WorkerStats]) -> RenderableType:
    rows = [
        (plain(w.worker_id), plain(g.name), g.num_pages, g.num_free, g.num_evictable, g.num_evicted)
        for w in workers
        for g in w.groups
    ]
    return table("pages", ("worker", "group", "all", "free", "evictable", "evicted so far"), rows, left=2)


def _snapshots_table(workers: list[cache_pb2.WorkerStats]) -> list[RenderableType]:
    """Returns a table of the groups of states; none without one."""
    rows = []
    for w in workers:
        for g in (group for group in w.groups if group.kind == types_pb2.GROUP_KIND_STATE):
            counts = (g.num_snapshots_taken, g.num_snapshots_restored, g.num_evicted, g.limited_tokens)
            rows.append((plain(w.worker_id), plain(g.name), *counts))
    columns = ("worker", "group", "taken", "restored", "evicted", "matched tokens\nnot used")
    return [table("snapshots", columns, rows, left=2)] if rows else []


def _host_table(tier: cache_pb2.HostTierStats) -> RenderableType:
    cells = {
        "breaker": "[red]open[/red]" if tier.breaker_open else "closed",
        "rows": tier.num_rows,
        "size": binary_size(tier.num_bytes),
        "quota": binary_size(tier.quota_bytes),
        "spilled\npages": tier.num_spilled_pages,
        "fetched\npages": tier.num_fetched_pages,
        "missing\npages": tier.num_missing_pages,
    }
    title = f"host tier · spill {plain(tier.spill_policy)} · fetch {plain(tier.fetch_policy)}"
    return table(title, tuple(cells), [tuple(cells.values())])


def words(name: str, prefix: str) -> str:
    """Returns an enum's value as words: MISS_REASON_PAGE_TAIL is "page tail"."""
    return name.removeprefix(prefix).lower().replace("_", " ")


def counts_line(answer: Answer) -> str:
    """Returns where the prompt's tokens came from, and how soon the first new one was there."""
    usage = answer.usage
    return (
        f"[dim]{usage.prompt_tokens:,} prompt tokens: {usage.cached_tokens:,} cached, "
        f"{usage.fetched_tokens:,} fetched, {usage.computed_tokens:,} computed; "
        f"first token after {answer.first_token_s * 1e3:.0f} ms[/dim]"
    )
