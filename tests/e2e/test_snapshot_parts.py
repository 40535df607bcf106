"""Snapshots and pages that are larger than a part, through both services: fetched with exact counts and the texts of
cold runs; what a fault in a part becomes is a miss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.client import Answer, Client, nothing_is_held
from tests.e2e.conftest import Starter
from tests.e2e.processes import ServiceProcess
from tests.e2e.running import Draw, healthy
from tests.e2e.states import PAGE, make_states
from tests.redis_process import RedisProcess
from tier_client.part_codec import PART_HEADER_BYTES

LENGTH = 333
WHOLE = LENGTH // PAGE * PAGE
ANSWER = 24
VALUES = "stemcache:1:*:*"
# Of a snapshot: six convolutions of three columns of 64 fp32 elements are 4.5 KiB.
SNAPSHOT_PARTS = 5
LAYERS = ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"]

pytestmark = pytest.mark.xdist_group("snapshot_parts")


class Served(NamedTuple):
    """Two workers that cut pages into parts of 1 KiB, spill what they publish, and fetch whatever Redis has."""

    redis: RedisProcess
    cache: ServiceProcess
    here: ServiceProcess
    there: ServiceProcess

    def keys(self) -> set[bytes]:
        with self.redis.client() as redis:
            return set(redis.scan_iter(VALUES))

    def payloads(self, keys: Sequence[bytes]) -> dict[bytes, dict[bytes, bytes]]:
        """Of each part, without its header, which tells two writings apart."""
        with self.redis.client() as redis:
            found: Any = {key: redis.hgetall(key) for key in keys}
        return {
            key: {number: value[PART_HEADER_BYTES:] for number, value in parts.items()} for key, parts in found.items()
        }

    async def spilled(self, client: Client, prompt: Sequence[int]) -> tuple[Answer, list[bytes], list[bytes]]:
        """The answer `here` once the host tier has all of the prompt, and its keys: of pages, and of snapshots."""
        old, rows = self.keys(), (await client.stats(self.cache.address)).host_tier.num_rows + len(prompt) // PAGE
        answer = await client.generate(self.here.address, prompt, ANSWER)
        await client.until(
            self.cache.address, lambda stats: stats.host_tier.num_rows >= rows and nothing_is_held(stats)
        )
        with self.redis.client() as redis:
            num_parts = {key: redis.hlen(key) for key in self.keys() - old}
        snapshots = [key for key, count in num_parts.items() if count == SNAPSHOT_PARTS]
        pages = [key for key, count in num_parts.items() if count > SNAPSHOT_PARTS]
        assert len(pages) == len(prompt) // PAGE and snapshots and len(pages) + len(snapshots) == len(num_parts)
        return answer, pages, snapshots

    async def computed_there(self, client: Client, prompt: Sequence[int], first: Answer) -> None:
        """The other worker finds nothing to resume from, computes all of it, and has it then."""
        answers = [await client.generate(self.there.address, prompt, ANSWER) for _ in range(2)]
        assert [answer.counts for answer in answers] == [(0, 0, LENGTH), (WHOLE, 0, LENGTH - WHOLE)]
        assert answers[0].tokens == answers[1].tokens == first.tokens == await cold(client, self.there, prompt)
        await client.until(self.cache.address, healthy)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path, redis_binary: str) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("states")
    make_states(folder, model / "tokenizer.json", layer_types=LAYERS, num_hidden_layers=len(LAYERS))
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(redis_binary))
        start = Starter(tmp_path_factory.mktemp("services"), folder, stack)
        cache = start.cache(redis_url=redis.url, spill="write_through", fetch="always", grace_ms=20_000)
        here, there = start.workers(cache.address, 2, host_tier="redis", redis_url=redis.url, host_part_kb=1)
        yield Served(redis, cache, here, there)


async def cold(client: Client, worker: ServiceProcess, prompt: Sequence[int]) -> list[int]:
    return (await client.cold(worker.address, prompt, ANSWER)).varied_tokens


async def test_the_other_worker_fetches_every_part(client: Client, served: Served, draw: Draw) -> None:
    prompt = draw(LENGTH)
    first, _, _ = await served.spilled(client, prompt)
    answers = [await client.generate(served.there.address, prompt, ANSWER) for _ in range(2)]
    assert [answer.counts for answer in answers] == [(0, WHOLE, LENGTH - WHOLE), (WHOLE, 0, LENGTH - WHOLE)]
    assert answers[0].tokens == answers[1].tokens == first.tokens == await cold(client, served.there, prompt)
    stats = await client.until(served.cache.address, healthy)
    values = served.payloads(list(served.keys())).values()
    assert stats.host_tier.num_bytes == sum(len(part) for value in values for part in value.values())


async def test_a_tampered_part_is_corrupt_and_its_keys_go(client: Client, served: Served, draw: Draw) -> None:
    prompt = draw(LENGTH)
    first, _, snapshots = await served.spilled(client, prompt)
    rng = random.Random(1)
    with served.redis.client() as redis:
        for key in snapshots:
            field = str(rng.randrange(SNAPSHOT_PARTS))
            value: Any = redis.hget(key, field)
            redis.hset(key, field, value[:-1] + bytes([value[-1] ^ 1]))
    corrupt = (await client.stats(served.cache.address)).host_tier.num_corrupt_pages
    await served.computed_there(client, prompt, first)
    assert (await client.stats(served.cache.address)).host_tier.num_corrupt_pages > corrupt


async def test_swapped_parts_of_two_snapshots_are_corrupt(client: Client, served: Served, draw: Draw) -> None:
    prompt = draw(LENGTH)
    first, _, snapshots = await served.spilled(client, prompt)
    _, _, others = await served.spilled(client, draw(LENGTH))
    with served.redis.client() as redis:
        for key in snapshots:
            other: Any = redis.hget(others[0], "2")
            redis.hset(key, "2", other)
    corrupt = (await client.stats(served.cache.address)).host_tier.num_corrupt_pages
    await served.computed_there(client, prompt, first)
    assert (await client.stats(served.cache.address)).host_tier.num_corrupt_pages > corrupt


async def test_a_deleted_part_is_missing(client: Client, served: Served, draw: Draw) -> None:
    prompt = draw(LENGTH)
    first, _, snapshots = await served.spilled(client, prompt)
    with served.redis.client() as redis:
        for number, key in enumerate(snapshots):
            assert redis.hdel(key, str(number % SNAPSHOT_PARTS)) == 1
    missing = (await client.stats(served.cache.address)).host_tier.num_missing_pages
    await served.computed_there(client, prompt, first)
    assert (await client.stats(served.cache.address)).host_tier.num_missing_pages > missing


async def test_all_parts_expire_as_one_key(client: Client, served: Served, draw: Draw) -> None:
    prompt = draw(LENGTH)
    _, pages, snapshots = await served.spilled(client, prompt)
    with served.redis.client() as redis:
        lives = [redis.pttl(key) for key in (*pages, *snapshots)]
        assert all(isinstance(life, int) and life > 3_600_000 for life in lives), "a value of parts has its whole life"
        assert not [key for key in redis.scan_iter("*") if key.count(b":") > 5], "no half-written value is left"


async def test_redis_is_killed_and_every_part_is_written_again(client: Client, served: Served, draw: Draw) -> None:
    """A request meanwhile computes its prompt; what the devices have goes to the empty Redis, part by part."""
    prompt = draw(LENGTH)
    first, pages, snapshots = await served.spilled(client, prompt)
    before = served.payloads([*pages, *snapshots])
    served.redis.kill()
    lost = await client.generate(served.there.address, prompt, ANSWER)
    assert lost.counts == (0, 0, LENGTH) and lost.tokens == first.tokens
    served.redis.start()
    await client.until(
        served.cache.address, lambda stats: healthy(stats) and before.keys() <= served.keys(), timeout_s=60.0
    )
    assert served.payloads(list(before)) == before
