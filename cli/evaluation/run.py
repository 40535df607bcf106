"""`stemcache eval`: asks the same questions by every way in which a prefix can be obtained, and compares with cold.

ways.py says what each way does, table.py shows the results.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from cli.client import Answer, StemcacheClient
from cli.cluster import ClusterOptions, start_cluster
from cli.evaluation.result import WayResult
from cli.evaluation.services import EvalServices
from cli.evaluation.sheets import Asked, SheetPlan, draw_sheets
from cli.evaluation.ways import WAYS
from cli.output import Output
from cli.run_file import state_dir
from cli.supervisor import Supervisor
from protos.v1 import worker_pb2

WAY_TIMEOUT_S = 3600.0
COLD = "cold"


@dataclass(frozen=True, slots=True)
class LeastAccuracy:
    """What the cold run has to reach; the other rows must give the same texts. Zero asks for nothing."""

    one_fact: float = 0.0
    two_facts: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was asked of which model, and the results."""

    plan: SheetPlan
    worker: worker_pb2.DescribeResponse
    tokens_of_registers: tuple[int, ...]
    results: tuple[WayResult, ...]
    took_s: float

    @property
    def passed(self) -> bool:
        return not any(result.failures for result in self.results)


async def evaluate(
    options: ClusterOptions, plan: SheetPlan, ways: Sequence[str], least: LeastAccuracy, output: Output
) -> Evaluation:
    """On services of its own, which are gone on return. The cold run comes first, also when `ways` leaves it out.

    Raises ValueError when the registers cannot hold the plan's questions.
    """
    start = time.perf_counter()
    async with Supervisor(state_dir() / "logs" / "eval", output.progress) as supervisor:
        cluster = await start_cluster(supervisor, options, output.progress)
        async with StemcacheClient(cluster.cache, cluster.workers) as client:
            with output.working("drawing registers and questions"):
                sheets = await draw_sheets(client, cluster.workers[0], plan)
            described = await client.describe(cluster.workers[0])
            services = EvalServices(client, supervisor, cluster, options, sheets, described.page_tokens)
            try:
                results = await play_ways(
                    services, [COLD, *(way for way in WAYS if way in ways and way != COLD)], output
                )
                expect_accuracy(results[0], least)
            finally:
                await services.close()
    sizes = tuple(len(sheet.prefix) for sheet in sheets)
    return Evaluation(plan, described, sizes, tuple(results), time.perf_counter() - start)


async def play_ways(services: EvalServices, ways: Sequence[str], output: Output) -> list[WayResult]:
    """One after the other; a way that raises is a failed row, and the next one is tried."""
    results: list[WayResult] = []
    cold: dict[Asked, Answer] = {}
    for name in ways:
        start = time.perf_counter()
        result = WayResult(name, WAYS[name].title)
        with output.counting(f"{result.title}", sum(len(sheet.asked) for sheet in services.sheets)) as services.advance:
            try:
                async with asyncio.timeout(WAY_TIMEOUT_S):
                    await _play_one(services, name, result, cold)
            except Exception as error:
                result.failures.append(f"{type(error).__name__}: {error}")
        results.append(result)
        output.progress(f"{result.title}: {time.perf_counter() - start:.1f} s")
    return results


async def _play_one(services: EvalServices, name: str, result: WayResult, cold: dict[Asked, Answer]) -> None:
    replies = await WAYS[name].play(services, result)
    if not replies:
        result.expect(False, "nothing was asked")
        return
    if name == COLD:
        cold.update((reply.asked, reply.answer) for reply in replies)
    else:
        result.expect_hits(replies)
    result.count(replies, cold)


def expect_accuracy(cold: WayResult, least: LeastAccuracy) -> None:
    """Adds a failure for each accuracy below the model's known one."""
    for what, marks, wanted in (
        ("one-fact", cold.one_fact, least.one_fact),
        ("two-fact", cold.two_facts, least.two_facts),
    ):
        found = marks.accuracy
        cold.expect(
            found is None or found >= wanted, f"{what} accuracy is {found or 0.0:.1%}, at least {wanted:.0%} is wanted"
        )


def as_json(evaluation: Evaluation, model: str) -> dict[str, object]:
    """Everything that the table and the plot show; `model` is its name for people."""
    plan, worker = evaluation.plan, evaluation.worker
    return {
        "passed": evaluation.passed,
        "stemcache": version("stemcache"),
        "model": model,
        "device": worker.device,
        "dtype": worker.dtype,
        "kv_dtype": worker.config.get("kv_dtype", "auto"),
        "cpus": os.cpu_count() or 0,
        "page_tokens": worker.page_tokens,
        "questions": plan.questions,
        "registers": plan.registers,
        "register_tokens": list(evaluation.tokens_of_registers),
        "kinds": [kind.value for kind in plan.kinds],
        "seed": plan.seed,
        "took_s": round(evaluation.took_s, 1),
        "ways": [_way_json(result) for result in evaluation.results],
    }


def _way_json(result: WayResult) -> Mapping[str, object]:
    accuracy = {"one_fact_accuracy": result.one_fact.accuracy, "two_facts_accuracy": result.two_facts.accuracy}
    return {**asdict(result), **accuracy}
