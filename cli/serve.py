"""The commands that start things: up, down, demo.

Knows the order only; cluster.py knows the services.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Annotated

import typer
from rich.console import RenderableType

from cli.app import JsonOption, app, fail, run
from cli.cluster import HOST_TIERS, Cluster, ClusterOptions, demo_model_folder, start_cluster
from cli.demo import as_json, play, scene_table
from cli.output import Output, table
from cli.run_file import RunRecord, read_record, remove_record, state_dir, write_record
from cli.supervisor import ChildFailed, Supervisor

ModelOption = Annotated[
    str, typer.Option("--model", help="Folder or hub id of a Hugging Face checkpoint; default: a small seeded model.")
]
TierOption = Annotated[str, typer.Option("--host-tier", help=f"Where pages spill to: {', '.join(HOST_TIERS)}.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the small model and of the traffic.")]


@app.command()
def up(
    model: ModelOption = "",
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Worker processes.")] = 2,
    cache_port: Annotated[int, typer.Option("--cache-port", min=0, max=65535)] = 7400,
    worker_port: Annotated[
        int, typer.Option("--worker-port", min=0, max=65535, help="The first worker's; the others follow.")
    ] = 7500,
    host_tier: TierOption = "auto",
    policy: Annotated[str, typer.Option("--policy", help="Eviction policy: lru, slru, priority.")] = "lru",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    seed: SeedOption = 0,
) -> None:
    """Start Redis, the cache service and workers; restart what dies; Ctrl-C ends them all."""
    _check_tier(host_tier)
    if read_record() is not None:
        fail("`stemcache up` is running here already; `stemcache down` stops it")
    output = Output(as_json=False)
    folder = _model(model, seed, output)
    options = ClusterOptions(
        folder, workers, cache_port, worker_port, host_tier=host_tier, policy=policy, device=device
    )
    try:
        run(_serve(options, output))
    except ChildFailed as error:
        fail(str(error))


@app.command()
def down() -> None:
    """Stop what `stemcache up` runs here."""
    record = read_record()
    if record is None:
        fail("nothing is running here")
    os.kill(record.pid, signal.SIGTERM)
    for _ in range(600):
        if read_record() is None:
            return
        time.sleep(0.1)
    fail(f"process {record.pid} has not ended after 60 s")


@app.command()
def demo(
    model: ModelOption = "",
    host_tier: TierOption = "auto",
    seed: SeedOption = 0,
    json_: JsonOption = False,
) -> None:
    """Start everything, show every way a prefix is reused, compare each with a cold run, and end."""
    _check_tier(host_tier)
    output = Output(as_json=json_)
    folder = _model(model, seed, output)
    try:
        results = run(play(ClusterOptions(folder, host_tier=host_tier), seed, output))
    except ChildFailed as error:
        fail(str(error))
    output.show(scene_table(results))
    output.emit(as_json(results, folder))
    if any(result.failures for result in results):
        raise typer.Exit(1)


async def _serve(options: ClusterOptions, output: Output) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Supervisor(state_dir() / "logs", output.progress) as supervisor:
        starting = asyncio.create_task(start_cluster(supervisor, options, output.progress))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        cluster = starting.result()
        write_record(RunRecord(os.getpid(), cluster.cache, cluster.workers, cluster.cache_metrics))
        try:
            output.show(_addresses(cluster))
            await stopping
            output.progress("stopping")
        finally:
            remove_record()


def _addresses(cluster: Cluster) -> RenderableType:
    rows = [("cache service", cluster.cache), ("metrics", f"http://{cluster.cache_metrics}/metrics")]
    rows += list(zip(cluster.worker_names, cluster.workers, strict=True))
    return table("Stemcache is running; Ctrl-C stops it", ("what", "address"), rows, left=2)


def _model(given: str, seed: int, output: Output) -> str:
    if given:
        return given
    from worker_service.model.demo_model import make_demo_model

    folder = demo_model_folder(seed)
    if not (folder / "model.safetensors").exists():
        with output.working("making a small seeded model"):
            make_demo_model(folder, seed)
    return str(folder)


def _check_tier(host_tier: str) -> None:
    if host_tier not in HOST_TIERS:
        fail(f"--host-tier: must be one of {', '.join(HOST_TIERS)}, not {host_tier!r}")
