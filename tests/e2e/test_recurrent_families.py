"""More families with recurrent states through both services, with exact counts and texts equal to cold runs.

The workers run in this process and are asked over gRPC like any others. tests/e2e/test_states.py does more with two of
the families, tests/e2e/test_states_sabotage.py replaces the snapshots of all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.client import Answer, Client, nothing_is_held
from tests.e2e.conftest import Starter
from tests.e2e.running import Draw, healthy
from tests.e2e.sabotage import Stand, open_stand
from tests.e2e.states import GROUPS, MODELS, PAGE, make_states
from tests.examples import THOROUGH
from tests.redis_process import RedisProcess

BUDGET = 300
ANSWER = 24
# Prompts, and how much of each a second run need not compute.
CACHED = {65: 64, 192: 128, 800: 768, **({128: 64, 1024: 960} if THOROUGH else {})}


class Pair(NamedTuple):
    """Two workers of one family, which compute at most BUDGET tokens a launch."""

    client: Client
    cache: str
    here: Stand
    there: Stand

    async def generate(self, worker: Stand, prompt: Sequence[int]) -> Answer:
        return await self.client.generate(worker.address, prompt, ANSWER)

    async def cold(self, worker: Stand, prompt: Sequence[int]) -> list[int]:
        return (await self.client.cold(worker.address, prompt, ANSWER)).varied_tokens

    async def spilled(self, prompt: Sequence[int]) -> Answer:
        """The answer `here`, once all pages of the prompt are in the host tier."""
        rows = (await self.client.stats(self.cache)).host_tier.num_rows + len(prompt) // PAGE
        answer = await self.generate(self.here, prompt)
        await self.client.until(
            self.cache, lambda stats: stats.host_tier.num_rows >= rows and nothing_is_held(stats) and healthy(stats)
        )
        return answer


NAMES = [name for name in MODELS if name not in ("lfm2", "qwen3.5")]


@pytest.fixture(params=NAMES)
async def pair(
    request: pytest.FixtureRequest, client: Client, start: Starter, model: Path, tmp_path: Path, redis: RedisProcess
) -> AsyncIterator[Pair]:
    folder = tmp_path / "family"
    make_states(folder, model / "tokenizer.json", request.param)
    cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
    settings = {"host_tier": "redis", "redis_url": redis.url, "token_budget": BUDGET, "pool_mb": 64}
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(
                open_stand(client, cache.address, folder, worker_id=f"worker-{number}", page_tokens=PAGE, **settings)
            )
            for number in (1, 2)
        ]
        assert tuple(spec.name for spec in here.pages.specs()) == GROUPS
        yield Pair(client, cache.address, here, there)


async def test_a_family_resumes_from_its_snapshots(pair: Pair, draw: Draw) -> None:
    """Repeated, gone on from in a second turn, and fetched by the other worker."""
    for length, cached in CACHED.items():
        prompt = draw(length)
        answers = [await pair.generate(pair.here, prompt) for _ in range(2)]
        assert [answer.counts for answer in answers] == [(0, 0, length), (cached, 0, length - cached)]
        assert answers[0].tokens == answers[1].tokens == await pair.cold(pair.here, prompt)
    prompt = draw(5 * PAGE - ANSWER // 2)
    first = await pair.spilled(prompt)
    # The answer crossed a page's end: its rolling snapshot is the next turn's.
    turn = prompt + first.tokens + draw(20)
    second = await pair.generate(pair.here, turn)
    assert second.counts == (5 * PAGE, 0, len(turn) - 5 * PAGE)
    assert second.tokens == await pair.cold(pair.here, turn)
    fetched = await pair.generate(pair.there, prompt)
    assert fetched.counts == (0, 4 * PAGE, len(prompt) - 4 * PAGE)
    assert fetched.tokens == first.tokens == await pair.cold(pair.there, prompt)
    await pair.client.until(pair.cache, lambda stats: healthy(stats) and nothing_is_held(stats))
