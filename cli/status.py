"""The commands that look at a running system: status once, top again and again.

views.py formats the response, rates.py what changed since the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

import grpc
import grpc.aio
import typer
from rich.live import Live

from cli.app import CacheOption, JsonOption, app, number, run
from cli.client import StemcacheClient
from cli.message_json import to_dict
from cli.output import Output
from cli.places import find_cache
from cli.rates import RecentLooks
from cli.views import Moment, live_view, stats_view
from protos.v1 import cache_pb2


@app.command()
def status(cache: CacheOption = "", json_: JsonOption = False) -> None:
    """Workers, pools, hit rates and the host tier, once."""
    output = Output(as_json=json_)

    async def ask() -> cache_pb2.StatsResponse:
        async with StemcacheClient(find_cache(cache), ()) as client:
            return await client.stats()

    stats = run(ask())
    output.show(stats_view(Moment(stats)))
    output.emit(to_dict(stats))


@app.command()
def top(
    cache: CacheOption = "",
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, callback=number, help="Seconds between looks.")
    ] = 1.0,
    json_: JsonOption = False,
) -> None:
    """The status, live, with what happens per second, until Ctrl-C; with --json one look and the end."""
    if json_:
        status(cache, json_=True)
        return
    output = Output(as_json=False)

    async def watch() -> None:
        async with StemcacheClient(find_cache(cache), ()) as client:
            if output.console.is_terminal:
                with Live(console=output.console, screen=True, auto_refresh=False) as live:
                    async for moment in moments(client, interval):
                        live.update(live_view(moment, output.console), refresh=True)
            else:  # for a pipe or a file: one whole status after the other
                async for moment in moments(client, interval):
                    output.show(stats_view(moment))

    run(watch())


async def moments(client: StemcacheClient, interval_s: float) -> AsyncIterator[Moment]:
    """Yields a reading each `interval_s`. While the cache service is away it is the last one, which says since when.

    Raises grpc.aio.AioRpcError when the first call gets no reply, and for any refusal.
    """
    looks = RecentLooks()
    moment = Moment(await client.stats())
    while True:
        if not moment.silent_since:
            looks.add(moment.stats, time.monotonic())
            moment = moment._replace(rates=looks.rates())
        yield moment
        await asyncio.sleep(interval_s)
        try:
            moment = Moment(await client.stats())
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            since = moment.silent_since or time.strftime("%H:%M:%S")
            moment = moment._replace(silent_since=since, address=client.cache, rates={})
