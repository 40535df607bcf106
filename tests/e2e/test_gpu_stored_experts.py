"""Two workers on a GPU, one with experts as their checkpoint stores them and one with dequantised ones: the same tokens
and logprobs, each over the other's pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.random_model import make_random_model
from tests.e2e.client import Client, unused_salt
from tests.e2e.conftest import Starter
from tests.redis_process import RedisProcess
from tests.worker_service.cuda_device import NEEDS_CUDA
from tests.worker_service.stored_models import make_fp8, make_mxfp4

pytestmark = [*NEEDS_CUDA, pytest.mark.timeout(300)]

LENGTH, PAGES = 200, 12
SIZES = {"vocab_size": 260, "max_position_embeddings": 1024, "eos_token_id": 257}


@pytest.fixture(params=["fp8", "mxfp4"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_random_model(folder)
    if request.param == "fp8":
        make_fp8(folder, "qwen3-moe", **SIZES)
    else:
        make_mxfp4(folder, **SIZES)
    return folder


@pytest.fixture
def addresses(start: Starter, redis: RedisProcess) -> Iterator[tuple[str, str, str]]:
    """The cache service's, the stored worker's and the other one's."""
    cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
    common = {"host_tier": "redis", "redis_url": redis.url, "pool_mb": 256, "device": "cuda", "dtype": "bfloat16"}
    workers = [
        start.workers(cache.address, 1, first, expert_weights=kept, **common)[0].address
        for first, kept in ((1, "stored"), (2, "dequantised"))
    ]
    yield cache.address, *workers


async def test_workers_of_both_kinds_exchange_pages(
    client: Client, addresses: tuple[str, str, str], draw: Callable[[int], list[int]]
) -> None:
    cache, stored, plain = addresses
    for first, second, num_rows in ((stored, plain, PAGES), (plain, stored, 2 * PAGES)):
        prompt = draw(LENGTH)
        wanted = await client.generate(first, prompt, 32, salt=unused_salt(), logprobs=True)
        await client.generate(first, prompt, 1)
        hit = await client.generate(first, prompt, 32, logprobs=True)
        assert hit.counts == (PAGES * 16, 0, LENGTH - PAGES * 16)
        await client.until(cache, lambda stats, wanted_rows=num_rows: stats.host_tier.num_rows >= wanted_rows)
        await client.idle(cache)
        fetched = await client.generate(second, prompt, 32, logprobs=True)
        assert fetched.counts == (0, PAGES * 16, LENGTH - PAGES * 16)
        cold = await client.generate(second, prompt, 32, salt=unused_salt(), logprobs=True)
        for made in (hit, fetched, cold):
            assert (made.tokens, made.logprobs) == (wanted.tokens, wanted.logprobs)
        assert len(set(wanted.logprobs)) > 4, "the answer hardly varies, so it would not show a wrong weight"
