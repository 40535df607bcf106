"""Models with sliding windows through both services: hits answer as cold runs do (case 56), fetched ones too."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.client import Client, unused_salt
from tests.e2e.conftest import Starter
from tests.e2e.running import Draw, healthy
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


@pytest.fixture(params=sorted(FAMILIES))
def window_model(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> tuple[str, Path]:
    """Random weights of a family, with the demo model's tokenizer."""
    family = request.param
    kind = {"mistral": "Mistral", "qwen2": "Qwen2"}[family]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(5)
    folder = tmp_path / family
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    shutil.copy(model / "tokenizer.json", folder)
    return family, folder


async def test_hits_answer_as_cold_runs_do(
    client: Client, start: Starter, redis: RedisProcess, window_model: tuple[str, Path], draw: Draw
) -> None:
    family, folder = window_model
    cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
    settings = {"host_tier": "redis", "redis_url": redis.url, "token_budget": 128}
    here, there = (w.address for w in start.workers(cache.address, 2, model=folder, **settings))
    stats = await client.until(cache.address, lambda stats: len(stats.workers) == 2)
    assert [group.name for group in stats.workers[0].groups] == GROUPS[family]

    prompt = draw(333)
    cold = await client.generate(here, prompt, 40)
    assert cold.counts == (0, 0, 333)
    assert len(set(cold.tokens)) > 5, "an answer of one repeated token shows nothing"
    warm = await client.generate(here, prompt, 40)
    assert warm.counts == (320, 0, 13)
    branches = [prompt[:length] + draw(30) for length in (330, 200, 100)]
    hot = await asyncio.gather(*(client.generate(here, branch, 20) for branch in branches))
    alone = [await client.generate(here, branch, 20, salt=unused_salt()) for branch in branches]
    assert warm.tokens == cold.tokens
    assert [answer.tokens for answer in hot] == [answer.tokens for answer in alone]
    assert hot[0].usage.cached_tokens > 0

    turn = prompt + cold.tokens + draw(20)
    second = await client.generate(here, turn, 20)
    assert second.usage.cached_tokens == (333 + 40 - 1) // 16 * 16
    assert second.tokens == (await client.generate(here, turn, 20, salt=unused_salt())).tokens

    await client.idle(cache.address)
    fetched = await client.generate(there, prompt, 40)
    assert fetched.usage.fetched_tokens > 0
    assert fetched.tokens == cold.tokens
    await client.until(cache.address, healthy)
