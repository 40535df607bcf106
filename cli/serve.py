"""The commands that start things: up, down, demo.

cluster.py starts the services.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from cache_service.core.device.eviction_order import POLICIES
from cli.addresses import CannotStart
from cli.app import JsonOption, app, check_choice, fail, run
from cli.cluster import Cluster, ClusterOptions, start_cluster
from cli.demo import as_json, passed, play
from cli.host_tier import HOST_TIERS
from cli.model_to_serve import HYBRID, RANDOM, model_to_serve
from cli.output import Output, plain, table
from cli.places import command_name
from cli.run_file import AlreadyRunning, RunRecord, claim_state_dir, is_claimed, read_record, state_dir, write_record
from cli.scene_table import scene_table
from cli.scenes import SCENES
from cli.supervisor import ChildFailed, Supervisor

DEVICES = ("auto", "cpu", "cuda")
DOWN_WAIT_S = 60.0
DEMO_POOL_MB = 512

MODEL_HELP = (
    f"Folder or hub id, {HYBRID}: the box's other model, or {RANDOM}: random weights; default: the one in the box."
)
TIER_HELP = f"Where pages spill to: {', '.join(HOST_TIERS)}."
DEVICE_HELP = f"Where the model runs: {', '.join(DEVICES)}."
POOL_HELP = "MiB of pages of each worker; 0: 512 on a CPU, its share of 90 % of what is free on a GPU."
POLICY_HELP = f"Eviction policy: {', '.join(POLICIES)}."
WORKER_PORT_HELP = (
    "The first worker's, the others' follow; 0: any free ones. Default: 7500, or as STEMCACHE_WORKER_LISTEN says."
)
CACHE_PORT_HELP = "The cache service's; 0: any free one. Default: 7400, or as STEMCACHE_CACHE_LISTEN says."

ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
TierOption = Annotated[str, typer.Option("--host-tier", help=TIER_HELP)]
DeviceOption = Annotated[str, typer.Option("--device", help=DEVICE_HELP)]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of what is asked, and of a random model.")]


@app.command()
def up(
    model: Annotated[str, typer.Option("--model", envvar="STEMCACHE_WORKER_MODEL", help=MODEL_HELP)] = "",
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Worker processes.")] = 2,
    cache_port: Annotated[int | None, typer.Option("--cache-port", min=0, max=65535, help=CACHE_PORT_HELP)] = None,
    worker_port: Annotated[int | None, typer.Option("--worker-port", min=0, max=65535, help=WORKER_PORT_HELP)] = None,
    host_tier: Annotated[
        str, typer.Option("--host-tier", envvar="STEMCACHE_WORKER_HOST_TIER", help=TIER_HELP)
    ] = "auto",
    host_mb: Annotated[
        int,
        typer.Option(
            "--host-mb", envvar="STEMCACHE_CACHE_HOST_QUOTA_MB", min=1, help="MiB that the host tier may hold."
        ),
    ] = 1024,
    pool_mb: Annotated[int, typer.Option("--pool-mb", envvar="STEMCACHE_WORKER_POOL_MB", min=0, help=POOL_HELP)] = 0,
    policy: Annotated[str, typer.Option("--policy", envvar="STEMCACHE_CACHE_POLICY", help=POLICY_HELP)] = "adaptive",
    device: Annotated[str, typer.Option("--device", envvar="STEMCACHE_WORKER_DEVICE", help=DEVICE_HELP)] = "auto",
    seed: SeedOption = 0,
    json_: JsonOption = False,
) -> None:
    """Start Redis, the cache service and workers; restart what dies; Ctrl-C ends them all.

    Every other setting of the services counts, too: STEMCACHE_CACHE_* and STEMCACHE_WORKER_*. An address for workers is
    the first one's; the others' ports follow it.
    """
    check_choice("--host-tier", host_tier, HOST_TIERS)
    check_choice("--policy", policy, POLICIES)
    check_choice("--device", device, DEVICES)
    output = Output(as_json=json_)
    try:
        with claim_state_dir():
            options = ClusterOptions(
                model_to_serve(model, seed, output),
                workers,
                cache_port,
                worker_port,
                host_tier=host_tier,
                host_mb=host_mb,
                pool_mb=pool_mb,
                device=device,
                policy=policy,
                environ=os.environ,
            )
            run(_serve(options, output))
    except AlreadyRunning:
        fail(f"`stemcache up` is running here already (in {state_dir()}); `{command_name()} down` stops it")
    except (ChildFailed, CannotStart) as error:
        fail(str(error))


@app.command()
def down(json_: JsonOption = False) -> None:
    """Stop what `stemcache up` runs here, and wait until it has ended; nothing running is no error."""
    record = read_record()
    output = Output(as_json=json_)
    if record is None:
        if is_claimed():
            fail("`stemcache up` is still starting here; try again in a moment")
        output.show("nothing is running here")
        output.emit({"stopped": False})
        return
    os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_WAIT_S
    while is_claimed():
        if time.monotonic() > deadline:
            fail(f"process {record.pid} has not ended after {DOWN_WAIT_S:.0f} s")
        time.sleep(0.05)
    output.show("stopped")
    output.emit({"stopped": True, "pid": record.pid})


@app.command()
def demo(
    model: ModelOption = "",
    host_tier: TierOption = "auto",
    device: DeviceOption = "auto",
    scene: Annotated[
        list[int] | None,
        typer.Option("--scene", min=1, max=len(SCENES), help="Only this scene; may be given several times."),
    ] = None,
    seed: SeedOption = 0,
    json_: JsonOption = False,
) -> None:
    """Start everything, show every way a prefix is reused, compare each with a cold run, and end.

    Exit code 1 when a scene's expectation failed.
    """
    check_choice("--host-tier", host_tier, HOST_TIERS)
    check_choice("--device", device, DEVICES)
    output = Output(as_json=json_)
    folder = model_to_serve(model, seed, output)
    options = ClusterOptions(folder, host_tier=host_tier, device=device, pool_mb=DEMO_POOL_MB)
    numbers = sorted(set(scene or range(1, len(SCENES) + 1)))
    # As Ctrl-C: every child is ended before we are.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = run(play(options, seed, numbers, output))
    except (ChildFailed, CannotStart) as error:
        fail(str(error))
    output.show(scene_table(results, output.console.width))
    output.emit(as_json(results, folder))
    if not passed(results):
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
            output.progress("stopping")
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        _announce(starting.result(), output)
        await stopping
        output.progress("stopping")


def _announce(cluster: Cluster, output: Output) -> None:
    """Tells other commands, and who started this one, where everything is."""
    cache, workers = cluster.cache, cluster.workers
    record = RunRecord(os.getpid(), cache, workers, cluster.cache_metrics, cluster.cache_admin, cluster.worker_admins)
    write_record(record)
    output.show(_welcome(cluster))
    output.emit(
        {
            "pid": record.pid,
            "cache": cache,
            "cache_metrics": cluster.cache_metrics,
            "workers": dict(zip(cluster.worker_names, workers, strict=True)),
            "worker_metrics": dict(zip(cluster.worker_names, cluster.worker_metrics, strict=True)),
            "host_tier": cluster.host_tier,
        }
    )


def _welcome(cluster: Cluster) -> RenderableType:
    served = [("cache service", cluster.cache, cluster.cache_admin, cluster.cache_metrics)]
    served += zip(cluster.worker_names, cluster.workers, cluster.worker_admins, cluster.worker_metrics, strict=True)
    rows = [(*one[:2], *(address or "-" for address in one[2:])) for one in served]
    command = plain(command_name())
    return Group(
        table("Stemcache is running; Ctrl-C stops it", ("what", "calls", "admin", "metrics"), rows, left=4),
        "",
        f"host tier: {cluster.host_tier}; logs: {plain(str(state_dir() / 'logs'))}",
        "In another terminal, in the same folder:",
        f"  {command} ask",
        "      a question about a register; again: another question, and the register is cached now",
        f'  {command} explain "$({command} ask --show)"',
        "      what of that register is cached where, and why the rest is not",
        f"  {command} top",
        "      requests, hit rates and pools, live",
    )
