"""The whole engine on a GPU: workers serving a Llama-3-8B-shaped model of random weights in bf16, over real processes.

Every warm answer is compared with a cold run, and the hit is asserted. Takes 16 GiB of disk and a few minutes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import torch

from benchmarks.serving.checkpoint import LLAMA_8B, write_checkpoint
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess
from tests.redis_process import RedisProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = {**LLAMA_8B, "max_position_embeddings": 8192}
PAGE = 16


class Machine(NamedTuple):
    cache: str
    first: str
    second: str
    processes: tuple[ServiceProcess, ...]
    trace: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-8b")
    write_checkpoint(folder, torch.device("cuda"), CONFIG)
    torch.cuda.empty_cache()
    return folder


@pytest.fixture(scope="module", params=[0, 4096], ids=["one-chain", "segments"])
def machine(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory, redis_binary: str
) -> Iterator[Machine]:
    """Prompts attend in one chain of keys, or by segments of 4,096, of which a prompt of 4,600 tokens has two."""
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        starter = Starter(tmp_path_factory.mktemp("logs"), folder, stack)
        cache = starter.cache(redis_url=redis.url, spill="write_through", fetch="always")
        common = {"host_tier": "redis", "redis_url": redis.url, "pool_mb": 24_576, "device": "cuda"}
        common["attention_segment_tokens"] = request.param
        first = starter.workers(cache.address, 1, trace_path=trace, **common)[0]
        second = starter.workers(cache.address, 1, 2, **common)[0]
        yield Machine(cache.address, first.address, second.address, (cache, first, second), trace)


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    source = random.Random(request.node.nodeid)
    return lambda length: [source.randrange(CONFIG["vocab_size"]) for _ in range(length)]  # type: ignore[call-overload]


async def test_a_cached_prompt_in_chunks_gives_the_cold_tokens(
    client: Client, machine: Machine, draw: Callable[[int], list[int]]
) -> None:
    prompt = draw(4600)
    runs = [await client.generate(machine.first, prompt, 32) for _ in range(2)]
    assert [run.counts for run in runs] == [(0, 0, 4600), (4592, 0, 8)]
    reference = await client.cold(machine.first, prompt, 32)
    assert runs[0].tokens == reference.tokens
    assert runs[1].tokens == reference.tokens
    assert len(set(reference.tokens)) > 4, "the answer hardly varies, so it would not show a wrong page"


async def test_another_prefix_gives_another_answer(
    client: Client, machine: Machine, draw: Callable[[int], list[int]]
) -> None:
    """Without this the comparisons above would prove nothing."""
    tail, answers = draw(40), []
    for _ in range(2):
        answers.append((await client.cold(machine.first, draw(1600) + tail, 16)).tokens)
    assert answers[0] != answers[1]


async def test_siblings_over_one_prefix_share_its_prefill(
    client: Client, machine: Machine, draw: Callable[[int], list[int]]
) -> None:
    prefix = draw(4096)
    prompts = [prefix + draw(512) for _ in range(8)]
    warm = await asyncio.gather(*(client.generate(machine.first, prompt, 16) for prompt in prompts))
    assert sum(answer.usage.computed_tokens for answer in warm) == 4096 + 8 * 512
    for answer, prompt in zip(warm, prompts, strict=True):
        assert answer.tokens == (await client.cold(machine.first, prompt, 16)).tokens


async def test_a_fetched_prefix_gives_the_cold_tokens(
    client: Client, machine: Machine, draw: Callable[[int], list[int]]
) -> None:
    prompt = draw(2000)
    await client.generate(machine.first, prompt, 1)
    await client.until(machine.cache, lambda stats: stats.host_tier.num_rows >= 124)
    await client.idle(machine.cache)
    fetched = await client.generate(machine.second, prompt, 16)
    assert fetched.counts == (0, 1984, 16)
    assert fetched.tokens == (await client.cold(machine.second, prompt, 16)).tokens


async def test_a_sibling_in_mid_flight_gives_the_cold_tokens(
    client: Client, machine: Machine, draw: Callable[[int], list[int]]
) -> None:
    prompt, decodes = draw(338), asyncio.Event()
    first = asyncio.create_task(
        client.generate(machine.first, prompt, 400, on_token=lambda count: decodes.set() if count >= 4 else None)
    )
    await decodes.wait()
    second = await client.generate(machine.first, prompt, 16)
    assert not first.done()
    assert second.counts == (336, 0, 2)
    reference = (await client.cold(machine.first, prompt, 16)).tokens
    assert second.tokens == reference
    assert (await first).tokens[:16] == reference


async def test_steps_hide_behind_launches(client: Client, machine: Machine, draw: Callable[[int], list[int]]) -> None:
    """The worker's own trace of 64 sequences that decode: round trips to the cache service run beside the GPU."""
    await asyncio.gather(*(client.generate(machine.first, draw(200), 128) for _ in range(64)))
    assert machine.processes[1].terminate() == 0
    spans = json.loads(machine.trace.read_text())["traceEvents"]
    launches = [(s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == "launch" and s["args"]["num_tokens"] == 64]
    # A reply that comes while the launch before still runs has cost the next launch nothing.
    ends = [s["ts"] + s["dur"] for s in spans if s["tid"] == "step"]
    ends = [end for end in ends if launches[0][0] <= end <= launches[-1][1]]
    hidden = [end for end in ends if any(start <= end <= stop for start, stop in launches)]
    durations = [stop - start for start, stop in launches]
    gaps = [following[0] - before[1] for before, following in pairwise(launches)]
    print(
        f"{len(launches)} launches of 64 rows: {median(durations) / 1e3:.2f} ms, gaps {median(gaps) / 1e3:.2f} ms; "
        f"{len(hidden)} of {len(ends)} replies came while a launch ran"
    )
    assert len(launches) > 64
    assert len(hidden) >= 0.9 * len(ends) > 0
