"""The commands that ask a running system: status, top, explain, pin, clear, generate, doctor.

Knows the protocol's answers and how to show them; decides nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from cli.app import CacheOption, JsonOption, SaltOption, WorkerOption, app, find_cache, find_workers, run
from cli.client import Answer, StemcacheClient, to_dict
from cli.output import Output, mebibytes, table
from protos.v1 import cache_pb2, types_pb2, worker_pb2

PromptArgument = Annotated[str, typer.Argument(help="Prompt text; - reads it from stdin.")]


@app.command()
def status(cache: CacheOption = "", json_: JsonOption = False) -> None:
    """Workers, pools, hit rates and the host tier, once."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.StatsResponse:
        async with StemcacheClient(find_cache(cache), ()) as client:
            return await client.stats()

    stats = run(ask())
    output.show(stats_view(stats))
    output.emit(to_dict(stats))


@app.command()
def top(
    cache: CacheOption = "",
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 1.0,
) -> None:
    """The status, live, until Ctrl-C."""

    async def watch() -> None:
        async with StemcacheClient(find_cache(cache), ()) as client:
            with Live(stats_view(await client.stats()), auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(interval)
                    live.update(stats_view(await client.stats()), refresh=True)

    run(watch())


@app.command()
def explain(
    prompt: PromptArgument,
    cache: CacheOption = "",
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """What of a prompt is cached where, and why the rest is not."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.ExplainResponse:
        workers = find_workers(worker)
        async with StemcacheClient(find_cache(cache), workers) as client:
            tokenized = await client.tokenize(workers[0], _text(prompt), salt)
            return await client.explain(tokenized.namespace, tokenized.token_ids)

    explained = run(ask())
    for one in explained.workers:
        output.show(explanation_view(one))
    if not explained.workers:
        output.show("no worker of this model is known to the cache service")
    output.emit(to_dict(explained))


@app.command()
def pin(
    prompt: PromptArgument,
    ttl: Annotated[float, typer.Option("--ttl", min=0.0, help="Seconds; 0 unpins.")] = 3600.0,
    cache: CacheOption = "",
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """Rank a cached prefix last for eviction, for a while."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.PinResponse:
        workers = find_workers(worker)
        async with StemcacheClient(find_cache(cache), workers) as client:
            tokenized = await client.tokenize(workers[0], _text(prompt), salt)
            return await client.pin(tokenized.namespace, tokenized.token_ids, int(ttl * 1000))

    response = run(ask())
    output.show(f"{response.pinned_tokens:,} cached tokens are {'pinned' if ttl else 'unpinned'}")
    output.emit(to_dict(response))


@app.command()
def clear(
    unused: Annotated[bool, typer.Option("--unused", help="Drop only what nobody holds.")] = False,
    salt: Annotated[str | None, typer.Option("--salt", help="Only this tenant's namespace; default: all.")] = None,
    cache: CacheOption = "",
    worker: WorkerOption = "",
    json_: JsonOption = False,
) -> None:
    """Drop cached prefixes; refused while live sequences hold some, unless --unused is given."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.ClearResponse:
        workers = find_workers(worker) if salt is not None else ()
        async with StemcacheClient(find_cache(cache), workers) as client:
            namespace: types_pb2.Namespace | None = None
            if salt is not None:
                namespace = (await client.tokenize(workers[0], "", salt)).namespace
            return await client.clear(namespace, unused_only=unused)

    response = run(ask())
    output.show(f"dropped {response.num_pages:,} pages and {response.num_host_rows:,} rows of the host tier")
    output.emit(to_dict(response))


@app.command()
def generate(
    prompt: PromptArgument,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    worker: WorkerOption = "",
    salt: SaltOption = "",
    json_: JsonOption = False,
) -> None:
    """Generate from a prompt, and say how much of it was cached."""
    output = Output(as_json=json_)
    sampling = worker_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    shown = 0

    def stream(answer: Answer) -> None:
        nonlocal shown
        if not json_:
            sys.stdout.write(answer.text[shown:])
            sys.stdout.flush()
            shown = len(answer.text)

    async def ask() -> Answer:
        workers = find_workers(worker)
        async with StemcacheClient("", workers) as client:
            return await client.generate(workers[0], _text(prompt), sampling, salt=salt, on_answer=stream)

    answer = run(ask())
    usage = answer.usage
    output.show(
        f"\n[dim]{usage.prompt_tokens} prompt tokens: {usage.cached_tokens} cached, {usage.fetched_tokens} fetched, "
        f"{usage.computed_tokens} computed; first token after {answer.first_token_s * 1e3:.0f} ms[/dim]"
    )
    output.emit({"text": answer.text, "token_ids": answer.token_ids, "usage": to_dict(usage)})


def stats_view(stats: cache_pb2.StatsResponse) -> RenderableType:
    """The whole status as tables: workers, pools, host tier."""
    return Group(_workers_table(stats), _pools_table(stats), _host_table(stats.host_tier))


def _workers_table(stats: cache_pb2.StatsResponse) -> RenderableType:
    rows = [
        (
            w.worker_id,
            w.endpoint,
            "connected" if w.connected else "gone",
            f"{w.num_leases:,}",
            f"{w.num_tickets:,}",
            f"{w.num_requests:,}",
            f"{w.prompt_tokens:,}",
            f"{w.cached_tokens:,}",
            f"{w.fetched_tokens:,}",
            f"{(w.cached_tokens + w.fetched_tokens) / w.prompt_tokens:.1%}" if w.prompt_tokens else "-",
        )
        for w in stats.workers
    ]
    columns = (
        "worker",
        "endpoint",
        "session",
        "leases",
        "tickets",
        "requests",
        "prompt",
        "cached",
        "fetched",
        "hit rate",
    )
    return table(f"policy {stats.policy} · {time.strftime('%H:%M:%S')}", columns, rows, left=3)


def _pools_table(stats: cache_pb2.StatsResponse) -> RenderableType:
    rows = [
        (w.worker_id, g.name, *(f"{n:,}" for n in (g.num_pages, g.num_free, g.num_evictable, g.num_evicted)))
        for w in stats.workers
        for g in w.groups
    ]
    return table("pools", ("worker", "group", "pages", "free", "evictable", "evicted so far"), rows, left=2)


def _host_table(tier: cache_pb2.HostTierStats) -> RenderableType:
    row = (
        tier.spill_policy,
        tier.fetch_policy,
        "open: no fetches" if tier.breaker_open else "closed",
        f"{tier.num_rows:,}",
        mebibytes(tier.num_bytes),
        mebibytes(tier.quota_bytes),
        f"{tier.num_spilled_pages:,}",
        f"{tier.num_fetched_pages:,}",
        f"{tier.num_missing_pages:,}",
    )
    columns = ("spill", "fetch", "breaker", "rows", "size", "quota", "spilled pages", "fetched pages", "missing pages")
    return table("host tier", columns, [row], left=3)


def explanation_view(one: cache_pb2.WorkerExplanation) -> RenderableType:
    """A worker's segments and notes."""
    rows = [
        (
            f"{s.first_token:,} .. {s.first_token + s.num_tokens - 1:,}",
            cache_pb2.Residence.Name(s.residence).removeprefix("RESIDENCE_").lower(),
            _reason(s.miss_reason) if s.residence == cache_pb2.RESIDENCE_MISSING else "",
            f"{s.num_tokens:,}",
        )
        for s in one.segments
    ]
    title = (
        f"{one.worker_id}: {one.match.usable_tokens:,} tokens usable, {one.match.host_tokens:,} more in the host tier"
    )
    return Group(table(title, ("tokens", "where", "why not", "count"), rows, left=3), *one.notes)


def _reason(reason: types_pb2.MissReason.ValueType) -> str:
    return types_pb2.MissReason.Name(reason).removeprefix("MISS_REASON_").lower().replace("_", " ")


def _text(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt
