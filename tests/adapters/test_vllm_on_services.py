"""The vLLM connector's two sides on a real cache service and a real Redis, which are killed and damaged. No vLLM.

Hits are counted by the service and read over gRPC; contents are compared with what the first engine computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from adapters.vllm.layout import GroupLayout
from adapters.vllm.settings import Settings
from adapters.vllm.tier_clients import make_index, make_store
from tests.adapters.stage import FULL, LATENT, PAGE_TOKENS, PAUSE_S, STATE, WINDOW, FakeRequest, Stage, layout
from tests.tier_client.conftest import staged
from tests.tier_client.stage import Stage as Services

TOKENS = list(range(5 * PAGE_TOKENS + 2))
ALL = 5 * PAGE_TOKENS


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with staged(tmp_path) as services:
        yield services


StartEngine = Callable[..., Stage]


@pytest.fixture
def start_engine(services: Services) -> Iterator[StartEngine]:
    """Engines of one model, each with clients of its own."""
    with ExitStack() as stack:

        def start(*groups: GroupLayout, ranks: int = 1) -> Stage:
            settings = Settings(
                cache=str(services.cache.settings["listen"]),
                redis=services.redis.url,
                # A slow machine must not turn an answer into a miss.
                call_timeout_s=20.0,
                store_timeout_s=20.0,
                pause_s=0.01,
            )
            spec = layout(*groups)
            index = make_index(settings, spec, ranks, engine="test", fingerprint=b"f" * 32, model="model")
            stage = Stage(spec, ranks, index=index, stores=[make_store(settings, spec, rank) for rank in range(ranks)])
            stack.callback(stage.close)
            return stage

        yield start


def tables(stage: Stage, first: int = 1) -> list[list[int]]:
    return [list(range(first + group * 6, first + group * 6 + 6)) for group in range(len(stage.spec.groups))]


def load(stage: Stage, request: FakeRequest) -> bool:
    """Loads all pages. Returns whether every rank did; then each block has what was computed."""
    offered = stage.matched(request)
    if offered != ALL:
        return False
    held = tables(stage, 13)
    stage.scheduler.allocated(request, held, offered)
    results = stage.step()
    if any(one.failed or one.bad_blocks for one in results):
        return False
    for group, table in zip(range(len(held)), held, strict=True):
        for page in range({FULL: 0, LATENT: 0, WINDOW: 3, STATE: 4}[stage.spec.groups[group]], 5):
            for rank in range(stage.num_ranks):
                writer = 0 if stage.spec.groups[group].replicated else rank
                assert stage.contents(group, table[page], rank) == {request.block_hashes[page][0] + writer}
    return True


def recover(stage: Stage) -> None:
    """Computes until all of it can be loaded: what was stored may be gone, and nothing be asked for a while."""
    for number in itertools.count():
        stage.clock += PAUSE_S
        request = FakeRequest(f"again {number}", TOKENS)
        if load(stage, request):
            return
        stage.compute(request, tables(stage))


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, STATE), (LATENT,)])
def test_a_second_engine_hits_what_the_first_one_stored(
    services: Services, start_engine: StartEngine, groups: tuple[GroupLayout, ...]
) -> None:
    first, second = start_engine(*groups, ranks=2), start_engine(*groups, ranks=2)
    first.compute(FakeRequest("a", TOKENS), tables(first))
    assert services.stats().attachments.committed_pages == 5
    assert load(second, FakeRequest("b", TOKENS))
    told = services.stats()
    assert (told.attachments.usable_pages, told.host_tier.num_fetched_pages) == (5, 5)
    assert told.attachments.num_leases == told.attachments.num_tickets == 0
    assert second.matched(FakeRequest("c", TOKENS, cache_salt="another tenant")) == 0
    with services.redis.client() as redis:
        num_values = sum(b"sentinel" not in key for key in redis.scan_iter(count=1000))
    assert num_values == sum({FULL: 10, LATENT: 5, WINDOW: 10, STATE: 2}[group] for group in groups)


def test_another_layout_or_number_of_ranks_meets_none_of_it(services: Services, start_engine: StartEngine) -> None:
    first = start_engine()
    first.compute(FakeRequest("a", TOKENS), tables(first))
    assert services.stats().attachments.committed_pages == 5
    assert start_engine(ranks=2).matched(FakeRequest("b", TOKENS)) == 0
    assert start_engine(FULL, WINDOW).matched(FakeRequest("c", TOKENS)) == 0
    assert start_engine().matched(FakeRequest("d", TOKENS)) == ALL


@pytest.mark.parametrize("fault", ["missing", "torn"])
def test_a_damaged_page_is_counted_and_written_again(services: Services, start_engine: StartEngine, fault: str) -> None:
    engine = start_engine()
    engine.compute(FakeRequest("a", TOKENS), tables(engine))
    with services.redis.client() as redis:
        key = sorted(key for key in redis.scan_iter(count=1000) if b"sentinel" not in key)[2]
        if fault == "missing":
            redis.delete(key)
        else:
            redis.setrange(key, 70, b"\xff\xfe\xfd")
    request = FakeRequest("b", TOKENS)
    assert not load(engine, request)
    tier = services.stats().host_tier
    assert (tier.num_missing_pages, tier.num_corrupt_pages) == ((1, 0) if fault == "missing" else (0, 1))
    engine.compute(request, tables(engine, 13))
    assert load(engine, FakeRequest("c", TOKENS))


def test_while_redis_is_dead_nothing_is_hit_and_afterwards_all_again(
    services: Services, start_engine: StartEngine
) -> None:
    engine = start_engine()
    engine.compute(FakeRequest("a", TOKENS), tables(engine))
    assert load(engine, FakeRequest("b", TOKENS))
    services.redis.kill()
    request = FakeRequest("c", TOKENS)
    if engine.matched(request):
        engine.scheduler.allocated(request, tables(engine, 13), ALL)
        (results,) = engine.step()
        assert results.finished == {"c"} and results.bad_blocks == set(tables(engine, 13)[0][:5])
        assert engine.matched(FakeRequest("d", TOKENS)) == 0, "the store is not asked for a while"
    engine.compute(request, tables(engine, 13))
    services.redis.start()
    recover(engine)


def test_while_the_cache_service_is_dead_nothing_is_hit_and_afterwards_all_again(
    services: Services, start_engine: StartEngine
) -> None:
    engine = start_engine()
    engine.compute(FakeRequest("a", TOKENS), tables(engine))
    services.cache.kill()
    request = FakeRequest("b", TOKENS)
    assert engine.matched(request) == 0
    engine.compute(request, tables(engine, 13))
    assert not engine.scheduler.has_open_saves()
    services.cache.start()
    recover(engine)
    assert services.stats().host_tier.num_fetched_pages == 5


def test_a_hit_from_before_a_restart_ends_no_lease_of_after(services: Services, start_engine: StartEngine) -> None:
    """Both are the first lease of their attachment."""
    engine = start_engine()
    engine.compute(FakeRequest("a", TOKENS), tables(engine))
    assert engine.matched(FakeRequest("before", TOKENS)) == ALL
    services.cache.kill()
    services.cache.start()
    after = next(name for name in map(str, itertools.count()) if engine.matched(FakeRequest(name, TOKENS)) == ALL)
    assert services.stats().attachments.num_leases == 1
    attaches = services.stats().attachments.num_attachments
    engine.scheduler.finished("before")
    engine.thread.run()
    assert services.stats().attachments.num_leases == 1
    engine.scheduler.finished(after)
    engine.thread.run()
    assert services.stats().attachments.num_leases == 0
    assert services.stats().attachments.num_attachments == attaches, "the present attachment goes on"
