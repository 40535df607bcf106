"""More families of models through both services, with exact counts and texts equal to cold runs.

One Redis and one cache service serve all of them, since families have namespaces of their own; the two workers run in
this process and are asked over gRPC like any others. tests/e2e/test_kinds.py does more with a model of each kind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from protos.v1 import cache_pb2
from tests.e2e.client import Answer, Client, nothing_is_held
from tests.e2e.conftest import Starter
from tests.e2e.kinds import FAMILIES, PAGE, make_kind
from tests.e2e.running import Draw, healthy
from tests.e2e.sabotage import Stand, open_stand
from tests.e2e.test_kinds_sabotage import Prefix, replaced
from tests.redis_process import RedisProcess

LENGTH = 333
ANSWER = 24


class Shared(NamedTuple):
    """The cache service spills every page that is published, and fetches whatever Redis has."""

    cache: str
    redis_url: str


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path, redis_binary: str) -> Iterator[Shared]:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        start = Starter(tmp_path_factory.mktemp("families"), model, stack)
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always")
        yield Shared(cache.address, redis.url)


class Pair(NamedTuple):
    """Two workers of one family."""

    family: str
    client: Client
    cache: str
    here: Stand
    there: Stand

    @property
    def has_window(self) -> bool:
        return any(name.startswith("window") for name in FAMILIES[self.family].groups)

    async def generate(self, worker: Stand, prompt: Sequence[int]) -> Answer:
        return await self.client.generate(worker.address, prompt, ANSWER)

    async def cold(self, worker: Stand, prompt: Sequence[int]) -> list[int]:
        return (await self.client.cold(worker.address, prompt, ANSWER)).varied_tokens

    async def at_rest(self) -> cache_pb2.StatsResponse:
        """Nothing is held, and what was to be spilled is in Redis."""
        return await self.client.until(self.cache, lambda stats: healthy(stats) and nothing_is_held(stats))


@pytest.fixture(params=FAMILIES)
async def pair(
    request: pytest.FixtureRequest, shared: Shared, client: Client, model: Path, tmp_path: Path
) -> AsyncIterator[Pair]:
    folder = tmp_path / "family"
    make_kind(request.param, folder, model / "tokenizer.json")
    settings = {
        "host_tier": "redis",
        "redis_url": shared.redis_url,
        "token_budget": 128,
        "pool_mb": 64,
    }
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(
                open_stand(client, shared.cache, folder, worker_id=f"{request.param}-{number}", **settings)
            )
            for number in (1, 2)
        ]
        yield Pair(request.param, client, shared.cache, here, there)


async def test_a_family_hits_and_fetches(pair: Pair, draw: Draw) -> None:
    """Repeated, branched off in the middle, gone on from in a second turn, and fetched by the other worker."""
    whole, middle = LENGTH // PAGE * PAGE, 200 // PAGE * PAGE
    here, there, prompt = pair.here, pair.there, draw(LENGTH)
    assert [spec.name for spec in here.pages.specs()] == list(FAMILIES[pair.family].groups)
    rows = (await pair.at_rest()).host_tier.num_rows
    first = await pair.generate(here, prompt)
    again = await pair.generate(here, prompt)
    assert [first.counts, again.counts] == [(0, 0, LENGTH), (whole, 0, LENGTH - whole)]
    branch, turn = prompt[:200] + draw(30), prompt + first.tokens + draw(20)
    branched, second = await pair.generate(here, branch), await pair.generate(here, turn)
    # The last token that was sampled never went through the model, so it has no KV.
    known = (LENGTH + ANSWER - 1) // PAGE * PAGE
    assert [branched.counts, second.counts] == [(middle, 0, 230 - middle), (known, 0, len(turn) - known)]

    published = (len(turn) + ANSWER - 1) // PAGE + (len(branch) + ANSWER - 1) // PAGE - 200 // PAGE
    await pair.client.until(pair.cache, lambda stats: stats.host_tier.num_rows >= rows + published)
    fetched = [await pair.generate(there, prompt) for _ in range(2)]
    assert [answer.counts for answer in fetched] == [(0, whole, LENGTH - whole), (whole, 0, LENGTH - whole)]
    elsewhere = await pair.generate(there, branch[:-1])
    # The window before that boundary was not fetched with the prompt; pages that see everything were.
    missing = (len(branch) - 2) // PAGE * PAGE
    assert elsewhere.usage.cached_tokens + elsewhere.usage.fetched_tokens == missing
    assert (elsewhere.usage.cached_tokens == 0) == pair.has_window

    cold = await pair.cold(here, prompt)
    assert cold == first.tokens == again.tokens == fetched[0].tokens == fetched[1].tokens
    assert cold == await pair.cold(there, prompt), "the workers differ"
    assert branched.tokens == await pair.cold(here, branch)
    assert second.tokens == await pair.cold(here, turn)
    assert elsewhere.tokens == await pair.cold(there, branch[:-1])
    await pair.at_rest()


async def test_a_page_of_another_prefix_changes_the_text(pair: Pair, draw: Draw) -> None:
    """One page of each group: the texts above depend on them."""
    stand = pair.here
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    await prefix.compute()
    await other.compute()
    sound = await prefix.ask()
    for group, spec in enumerate(stand.pages.specs()):
        page = prefix.first_seen(spec.window_tokens) if spec.window_tokens else prefix.num_pages // 2
        await pair.at_rest()
        with replaced(stand.pages, group, prefix.page_ids[group][page], other.page_ids[group][page]):
            assert await prefix.ask() != sound, f"page {page} of group {spec.name}"
    assert await prefix.ask() == sound
