"""Pages that hold the asked fact are damaged behind the manager's back: the accuracy figure must notice.

Every damaged answer comes from a hit, as far as anybody can tell. The control exchanges pages and must change nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from register_qa import MODEL_FOLDER, Question, Split, draw_questions, draw_register, is_correct
from tests.e2e.client import Client
from tests.e2e.conftest import Cluster, Starter
from tests.e2e.sabotage import FULL, Cached, Stand, open_stand

# About 550 tokens each; another register's pages must reach as far as the damaged ones.
HOLDINGS, OTHER_HOLDINGS = 20, 26
NUM_REGISTERS = 2
QUESTIONS_EACH = 6
# What a wrong page must bring the figure below, and what it is without one.
MOST_WHEN_DAMAGED, LEAST_WHEN_SOUND = 0.6, 0.9


@pytest.fixture
def folder() -> Path:
    return MODEL_FOLDER


@pytest.fixture
async def stand(start: Starter, client: Client, folder: Path) -> AsyncIterator[Stand]:
    async with open_stand(client, start.cache().address, folder) as opened:
        yield opened


# Damages what is at these places of the register.
Damage = Callable[[Cached, list[int]], None]


@contextmanager
def damaged(stand: Stand, cached: Cached, places: list[int], damage: Damage) -> Iterator[None]:
    """The pages of the register are as they were, on exit."""
    sound = stand.pages.read_pages(FULL, cached.page_ids).clone()
    damage(cached, places)
    yield
    stand.pages.write_pages(FULL, cached.page_ids, sound)


async def accuracy(stand: Stand, cached: list[Cached], damage: Damage) -> float:
    marks = []
    for one in cached:
        for question in questions_about(stand, one):
            with damaged(stand, one, stand.pages_of(one, question), damage):
                marks.append(is_correct(question, (await stand.ask(one, question)).text))
    assert len(marks) >= NUM_REGISTERS * QUESTIONS_EACH // 2
    return sum(marks) / len(marks)


def questions_about(stand: Stand, cached: Cached) -> list[Question]:
    """Those whose facts stand in whole pages: what is behind them is computed anew with every question."""
    drawn = draw_questions(cached.register, 7, QUESTIONS_EACH)
    return [question for question in drawn if stand.pages_of(cached, question)]


async def cached_registers(stand: Stand) -> list[Cached]:
    registers = [draw_register(900 + at, split=Split.EVAL, holdings=HOLDINGS) for at in range(NUM_REGISTERS)]
    return [await stand.cache(register, "tenant") for register in registers]


async def another_tenants(stand: Stand) -> Cached:
    register = draw_register(990, split=Split.EVAL, holdings=OTHER_HOLDINGS)
    return await stand.cache(register, "another tenant")


async def zeroed(stand: Stand) -> Damage:
    def damage(cached: Cached, places: list[int]) -> None:
        ids = [cached.page_ids[place] for place in places]
        stand.pages.write_pages(FULL, ids, torch.zeros_like(stand.pages.read_pages(FULL, ids)))

    return damage


async def replaced_by_another_registers(stand: Stand) -> Damage:
    other = await another_tenants(stand)

    def damage(cached: Cached, places: list[int]) -> None:
        wrong = stand.pages.read_pages(FULL, [other.page_ids[place] for place in places])
        stand.pages.write_pages(FULL, [cached.page_ids[place] for place in places], wrong)

    return damage


async def replaced_by_another_tenants_register(stand: Stand) -> Damage:
    other = await another_tenants(stand)

    def damage(cached: Cached, places: list[int]) -> None:
        wrong = stand.pages.read_pages(FULL, other.page_ids[: len(cached.page_ids)])
        stand.pages.write_pages(FULL, cached.page_ids, wrong)

    return damage


async def test_a_damaged_page_ruins_the_figure(stand: Stand) -> None:
    cached = await cached_registers(stand)
    sound = await accuracy(stand, cached, lambda cached, places: None)
    assert sound >= LEAST_WHEN_SOUND
    for make_damage in (zeroed, replaced_by_another_registers, replaced_by_another_tenants_register):
        figure = await accuracy(stand, cached, await make_damage(stand))
        print(make_damage.__name__, figure, sound)
        assert figure < MOST_WHEN_DAMAGED, make_damage.__name__
    # It was the damage, and it is undone.
    assert await accuracy(stand, cached, lambda cached, places: None) == sound


async def test_exchanging_two_pages_of_a_prefix_changes_nothing(stand: Stand) -> None:
    """Keys carry their positions, and a question sees the whole register, in whatever order its pages are."""

    def exchange(cached: Cached, places: list[int]) -> None:
        # Far apart: the asked page goes to the middle of the other half.
        mine = places[0]
        other = (mine + len(cached.page_ids) // 2) % len(cached.page_ids)
        ids = [cached.page_ids[mine], cached.page_ids[other]]
        stand.pages.write_pages(FULL, ids, stand.pages.read_pages(FULL, ids).flip(0))

    for cached in (await cached_registers(stand))[:2]:
        for question in questions_about(stand, cached)[:4]:
            sound = await stand.ask(cached, question)
            before = stand.pages.read_pages(FULL, cached.page_ids).clone()
            with damaged(stand, cached, stand.pages_of(cached, question), exchange):
                assert not torch.equal(stand.pages.read_pages(FULL, cached.page_ids), before)
                assert (await stand.ask(cached, question)).tokens == sound.tokens


async def test_another_keys_value_is_refused(
    client: Client, cluster: Cluster, draw: Callable[[int], list[int]]
) -> None:
    """A value with a valid checksum, but under the wrong key: a copy of another page of the same shape."""
    prompt, other, (here, there) = draw(480), draw(480), cluster.workers
    with cluster.redis.client() as redis:
        keys = []
        for tokens in (prompt, other):
            old = set(redis.scan_iter("stemcache:1:*:*"))
            await client.idle(cluster.cache)
            rows = (await client.stats(cluster.cache)).host_tier.num_rows
            await client.generate(here, tokens)
            # A moment after the answer nothing is held either: the pages' way to the tier begins then.
            await client.until(cluster.cache, lambda stats, most=rows + 30: stats.host_tier.num_rows >= most)
            keys.append(sorted(set(redis.scan_iter("stemcache:1:*:*")) - old))
        assert len(keys[0]) == len(keys[1]) == 30
        for key, wrong in zip(*keys, strict=True):
            value = redis.get(wrong)
            assert isinstance(value, bytes)
            redis.set(key, value, keepttl=True)
    corrupt = (await client.stats(cluster.cache)).host_tier.num_corrupt_pages
    answer = await client.generate(there, prompt)
    assert answer.counts == (0, 0, 480)
    assert answer.tokens == (await client.cold(here, prompt)).tokens
    assert (await client.stats(cluster.cache)).host_tier.num_corrupt_pages > corrupt
    sound = await client.generate(there, other)
    assert sound.usage.fetched_tokens > 0, "untouched values are as good as ever"
