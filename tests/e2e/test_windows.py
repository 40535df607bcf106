"""Models with sliding windows through both services: hits answer as cold runs do (case 56), fetched ones too."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.running import Draw, healthy
from tests.e2e.test_reuse import check_mid_flight
from tests.redis_process import RedisProcess

WINDOW = 40
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "sliding_window": WINDOW,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {"mistral": {}, "qwen2": {"use_sliding_window": True, "max_window_layers": 2}}
GROUPS = {"mistral": [f"window{WINDOW}"], "qwen2": ["full", f"window{WINDOW}"]}


class Windowed(NamedTuple):
    """A family's services: what is published is spilled, and fetched wherever Redis has it."""

    family: str
    cache: str
    here: str
    there: str


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def windowed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, redis_binary: str
) -> Iterator[Windowed]:
    """Random weights of a family, with the demo model's tokenizer, behind one cache service and two workers."""
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    kind = {"mistral": "Mistral", "qwen2": "Qwen2"}[family]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(5)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    shutil.copy(model / "tokenizer.json", folder)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        start = Starter(tmp_path_factory.mktemp(f"{family}-services"), folder, stack)
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
        workers = start.workers(cache.address, 2, host_tier="redis", redis_url=redis.url, token_budget=128)
        yield Windowed(family, cache.address, workers[0].address, workers[1].address)


async def test_a_sibling_hits_while_the_first_still_decodes(client: Client, windowed: Windowed, draw: Draw) -> None:
    """Cases 20 and 24 through both services: a window's pages are published mid-flight, too."""
    await check_mid_flight(client, windowed.here, draw(338), (336, 0, 2))
    await client.until(windowed.cache, healthy)


async def test_hits_answer_as_cold_runs_do(client: Client, windowed: Windowed, draw: Draw) -> None:
    family, cache, here, there = windowed
    stats = await client.until(cache, lambda stats: len(stats.workers) == 2)
    assert [group.name for group in stats.workers[0].groups] == GROUPS[family]

    prompt = draw(333)
    cold = await client.generate(here, prompt, 40)
    assert cold.counts == (0, 0, 333)
    assert len(set(cold.tokens)) > 5, "an answer of one repeated token shows nothing"
    warm = await client.generate(here, prompt, 40)
    assert warm.counts == (320, 0, 13)
    branches = [prompt[:length] + draw(30) for length in (330, 200, 100)]
    hot = await asyncio.gather(*(client.generate(here, branch, 20) for branch in branches))
    alone = [await client.cold(here, branch, 20) for branch in branches]
    assert warm.tokens == cold.tokens
    assert [answer.tokens for answer in hot] == [answer.tokens for answer in alone]
    assert hot[0].usage.cached_tokens > 0

    turn = prompt + cold.tokens + draw(20)
    second = await client.generate(here, turn, 20)
    assert second.usage.cached_tokens == (333 + 40 - 1) // 16 * 16
    assert second.tokens == (await client.cold(here, turn, 20)).tokens

    await client.idle(cache)
    fetched = await client.generate(there, prompt, 40)
    assert fetched.usage.fetched_tokens > 0
    assert fetched.tokens == cold.tokens
    await client.until(cache, healthy)
