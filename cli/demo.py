"""`stemcache demo`: starts everything, plays the scenes, shows the table, ends everything.

Knows the order of things only; the scenes know what they expect.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

from rich.console import Group
from rich.table import Table

from cli.client import StemcacheClient
from cli.cluster import ClusterOptions, start_cluster
from cli.output import Output, milliseconds, table
from cli.run_file import state_dir
from cli.scenes import SCENES, SceneResult, Stage
from cli.supervisor import Supervisor

SCENE_TIMEOUT_S = 300.0


async def play(options: ClusterOptions, seed: int, output: Output) -> list[SceneResult]:
    """All scenes in order; a scene that raises is a failed scene, and the next one is played."""
    async with Supervisor(state_dir() / "logs", output.progress) as supervisor:
        cluster = await start_cluster(supervisor, options, output.progress)
        async with StemcacheClient(cluster.cache, cluster.workers) as client:
            stage = Stage(
                client,
                supervisor,
                (cluster.worker_names[0], cluster.worker_names[1]),
                options.page_tokens,
                cluster.shared_tier,
                seed,
            )
            results = []
            for number, scene in enumerate(SCENES, 1):
                title = (scene.__doc__ or scene.__name__).splitlines()[0].rstrip(".")
                start = time.perf_counter()
                with output.working(f"scene {number}: {title}"):
                    results.append(await _play_one(scene(stage), scene.__name__))
                output.progress(f"scene {number} took {time.perf_counter() - start:.1f} s")
            return results


async def _play_one(scene: object, name: str) -> SceneResult:
    try:
        return await asyncio.wait_for(scene, SCENE_TIMEOUT_S)  # type: ignore[arg-type]
    except Exception as error:
        return SceneResult(name, same_answer=False, failures=[f"{type(error).__name__}: {error}"])


def scene_table(results: list[SceneResult]) -> Group:
    rows = [_row(number, result) for number, result in enumerate(results, 1)]
    columns = (
        "",
        "scene",
        "requests",
        "prompt",
        "cached",
        "fetched",
        "computed",
        "TTFT cold",
        "TTFT warm",
        "same answer",
    )
    made = table("", columns, rows, left=2)
    notes = Table.grid(padding=(0, 2))
    for number, result in enumerate(results, 1):
        for text in [result.note] * bool(result.note) + [
            f"[red]failed: {failure}[/red]" for failure in result.failures
        ]:
            notes.add_row(f"  {number}", text)
    return Group(made, notes)


def _row(number: int, result: SceneResult) -> tuple[object, ...]:
    if result.skipped:
        return number, f"{result.title}\n[yellow]skipped: {result.skipped}[/yellow]", *[""] * 8
    counts = (f"{n:,}" for n in (result.requests, result.prompt, result.cached, result.fetched, result.computed))
    same = "yes" if result.same_answer else "NO"
    return number, result.title, *counts, milliseconds(result.cold_s), milliseconds(result.warm_s), same


def as_json(results: list[SceneResult], model: str) -> dict[str, object]:
    return {"passed": not any(r.failures for r in results), "model": model, "scenes": [asdict(r) for r in results]}
