"""`stemcache demo`: starts everything, plays the scenes, ends everything.

scenes.py says what each scene expects, scene_table.py shows the results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict

from cli.client import StemcacheClient
from cli.cluster import Cluster, ClusterOptions, start_cluster
from cli.output import Output
from cli.run_file import state_dir
from cli.scenes import SCENES, Scene
from cli.stage import SceneResult, Stage
from cli.supervisor import Supervisor

SCENE_TIMEOUT_S = 300.0


async def play(options: ClusterOptions, seed: int, numbers: Sequence[int], output: Output) -> list[SceneResult]:
    """Plays the scenes of these numbers on services of their own, which have ended on return."""
    # Logs of its own, for `stemcache up` may be running here.
    async with Supervisor(state_dir() / "logs" / "demo", output.progress) as supervisor:
        cluster = await start_cluster(supervisor, options, output.progress)
        async with StemcacheClient(cluster.cache, cluster.workers) as client:
            stage = await _stage(client, supervisor, cluster, seed)
            return await play_scenes({number: SCENES[number - 1] for number in numbers}, stage, output)


async def play_scenes(scenes: dict[int, Scene], stage: Stage, output: Output) -> list[SceneResult]:
    """Plays all of them in order; a scene that raises is counted as failed, and the next one is played."""
    results = []
    for number, scene in scenes.items():
        title = (scene.__doc__ or scene.__name__).splitlines()[0].rstrip(".")
        start = time.perf_counter()
        with output.working(f"scene {number}: {title}"):
            result = await _play_one(scene, stage)
        result.number = number
        results.append(result)
        output.progress(f"scene {number} took {time.perf_counter() - start:.1f} s")
    return results


async def _play_one(scene: Scene, stage: Stage) -> SceneResult:
    try:
        async with asyncio.timeout(SCENE_TIMEOUT_S):
            return await scene(stage)
    except Exception as error:
        title = scene.__name__.replace("_", " ")
        return SceneResult(title, same_answer=False, failures=[f"{type(error).__name__}: {error}"])


async def _stage(client: StemcacheClient, supervisor: Supervisor, cluster: Cluster, seed: int) -> Stage:
    names = (cluster.worker_names[0], cluster.worker_names[1])
    worker = await client.describe(cluster.workers[0])
    page = worker.page_tokens
    interval = max([group.state_interval_tokens for group in worker.groups], default=0)
    return Stage(client, supervisor, names, page, interval or page, cluster.shared_tier, seed, worker.dtype)


def passed(results: Sequence[SceneResult]) -> bool:
    return not any(result.failures for result in results)


def as_json(results: Sequence[SceneResult], model: str) -> dict[str, object]:
    return {"passed": passed(results), "model": model, "scenes": [asdict(result) for result in results]}
