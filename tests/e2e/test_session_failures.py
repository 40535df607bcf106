"""A cache service that dies, restarts, freezes or is cut off while requests run: none is lost, no answer changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos.v1 import cache_pb2, types_pb2
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.kinds import make_kind
from tests.e2e.processes import ServiceProcess
from tests.e2e.proxy import open_proxy
from tests.e2e.running import Draw, Running, healthy, lengths
from tests.examples import thorough

PAGE, SHARED_PAGES = 16, 4
# With pages for the rest of their answers the requests would end while the cache service is away.
PAUSING = {"max_decode_ahead_tokens": 0, "detach_after_ms": 0}


@pytest.mark.parametrize("away_s", [0.0, 1.5])
async def test_live_requests_survive_a_restart_of_the_cache_service(
    client: Client, start: Starter, draw: Draw, away_s: float
) -> None:
    cache = start.cache()
    worker = start.workers(cache.address, **PAUSING)[0]
    running = Running(client, worker.address, lengths(draw))
    await running.decoding.wait()
    cache.kill()
    await asyncio.sleep(away_s)
    assert running.all_run, "they ended before the cache service did"
    waiting = asyncio.create_task(client.generate(worker.address, draw(40)))
    cache.settings["listen"] = cache.address
    epoch = cache.announced["epoch"]
    await asyncio.to_thread(cache.start)
    assert cache.announced["epoch"] != epoch
    await running.check()
    assert (await waiting).usage.generated_tokens == 8
    # What the adopted requests had computed is findable again.
    again = await client.generate(worker.address, running.prompts[3])
    assert again.counts == (288, 0, 12)
    await client.until(cache.address, healthy)


async def test_a_stream_that_is_cut_again_and_again_loses_nothing(client: Client, start: Starter, draw: Draw) -> None:
    cache = start.cache()
    async with open_proxy(cache.address) as proxy:
        worker = (await asyncio.to_thread(start.workers, proxy.address, **PAUSING))[0]
        running = Running(client, worker.address, lengths(draw), 300)
        await running.decoding.wait()
        epochs = {(await client.stats(cache.address)).epoch}
        for _ in range(4):
            assert running.all_run
            num_before = proxy.num_connections
            await proxy.cut()
            async with asyncio.timeout(20):
                while proxy.num_connections == num_before:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        await running.check()
        stats = await client.until(cache.address, healthy)
        assert epochs == {stats.epoch}
        assert [w.incarnation for w in stats.workers] == [worker.announced["incarnation"]]
        assert proxy.num_connections >= 5


async def test_a_stream_cut_for_longer_than_the_grace_period_is_adopted_anew(
    client: Client, start: Starter, draw: Draw
) -> None:
    cache = start.cache(grace_ms=200)
    async with open_proxy(cache.address) as proxy:
        worker = (await asyncio.to_thread(start.workers, proxy.address, reply_timeout_s=1.0, **PAUSING))[0]
        running = Running(client, worker.address, lengths(draw))
        await running.decoding.wait()
        proxy.is_open.clear()
        await proxy.cut()
        await client.until(cache.address, lambda stats: not stats.workers)
        assert running.all_run
        proxy.is_open.set()
        await running.check()
        await client.until(cache.address, healthy)


async def test_what_a_sequence_computed_before_a_clear_call_is_not_published_after_it(
    client: Client, start: Starter, draw: Draw
) -> None:
    """The Clear call comes while the cache service has forgotten the worker: no lease tells it of the sequence."""
    cache, prompt, num_tokens = start.cache(grace_ms=200), draw(300), 150
    async with open_proxy(cache.address) as proxy:
        worker = (await asyncio.to_thread(start.workers, proxy.address, reply_timeout_s=1.0, **PAUSING))[0]
        kept = draw(200)
        await client.generate(worker.address, kept, salt="kept")
        model = (await client.stats(cache.address)).workers[0].model
        decoding = asyncio.Event()
        running = asyncio.create_task(
            client.generate(
                worker.address, prompt, num_tokens, salt="cleared", on_token=lambda n: decoding.set() if n > 2 else None
            )
        )
        await decoding.wait()
        proxy.is_open.clear()
        await proxy.cut()
        await client.until(cache.address, lambda stats: not stats.workers)
        clear = cache_pb2.ClearRequest(namespace=types_pb2.Namespace(model=model, salt="cleared"))
        await client.cache_admin(cache.announced["admin"]).Clear(clear)
        assert not running.done()
        proxy.is_open.set()
        answer = await running
        stats = await client.worker_stats(cache.address, "worker-1")
        assert (stats.prompt_tokens > len(prompt), stats.cached_tokens) == (True, 0), "computed anew, and nothing found"
        cold = await client.cold(worker.address, prompt, num_tokens)
        assert answer.tokens == cold.tokens
        # Another namespace is as it was.
        assert (await client.generate(worker.address, kept, salt="kept")).counts == (192, 0, 8)
        await client.until(cache.address, healthy)


async def test_a_frozen_cache_service_is_waited_for(client: Client, start: Starter, draw: Draw) -> None:
    cache = start.cache()
    worker = start.workers(cache.address, reply_timeout_s=0.5, **PAUSING)[0]
    running = Running(client, worker.address, lengths(draw))
    await running.decoding.wait()
    cache.freeze()
    await asyncio.sleep(1.2)
    assert running.all_run
    cache.thaw()
    await running.check()
    await client.until(cache.address, healthy)


async def test_streams_go_on_while_the_cache_service_stands_still(client: Client, start: Starter, draw: Draw) -> None:
    """With default settings, as far as free pages reach: here to the ends of their answers, 600 tokens on."""
    cache = start.cache()
    worker = start.workers(cache.address)[0]
    running = Running(client, worker.address, lengths(draw), 600)
    await running.decoding.wait()
    held = sum((len(prompt) + 600) // PAGE for prompt in running.prompts) - 2 * SHARED_PAGES
    await client.until(cache.address, lambda stats: num_taken(stats) >= held)
    cache.freeze()
    assert running.all_run, "they ended before the cache service stood still"
    answers = await asyncio.gather(*running.tasks)
    assert [len(answer.tokens) for answer in answers] == [600] * 4
    cache.thaw()
    await running.check()
    await client.until(cache.address, healthy)


@pytest.mark.parametrize("restarted", [False, True])
async def test_in_a_full_pool_streams_take_pages_of_cached_prompts_while_the_cache_service_is_away(
    client: Client, start: Starter, draw: Draw, restarted: bool
) -> None:
    cache = start.cache()
    worker = start.workers(cache.address, pool_pages=170, max_model_len=2048)[0]
    fillers = [draw(400) for _ in range(7)]
    for filler in fillers:
        await client.generate(worker.address, filler, 2)
    running = Running(client, worker.address, lengths(draw), 300)
    await running.decoding.wait()
    assert num_free(await client.stats(cache.address)) < 20, "pages are free: nothing has to be taken"
    if restarted:
        cache.kill()
    else:
        cache.freeze()
    assert running.all_run, "they ended before the cache service was away"
    answers = await asyncio.gather(*running.tasks)
    assert [len(answer.tokens) for answer in answers] == [300] * 4
    assert "streams take pages by themselves" in worker.logged()
    cache.settings["listen"] = cache.address
    await asyncio.to_thread(cache.start if restarted else cache.thaw)
    # The prompt that was used last before the streams is cached as it was, and so is what they computed.
    await client.until(cache.address, lambda stats: [w.connected for w in stats.workers] == [True])
    assert (await client.generate(worker.address, fillers[-1], 2)).counts == (384, 0, 16)
    spoken = [*running.prompts[3], *answers[3].tokens]
    assert (await client.generate(worker.address, spoken, 2)).counts == (592, 0, 8)
    await running.check()
    await client.until(cache.address, healthy)


@pytest.mark.parametrize(("name", "page"), [("glm-dsa", 16), thorough("deepseek-v4", 128)])
async def test_where_two_groups_keep_whole_prompts_what_prompts_share_stays_cached_through_an_outage(
    client: Client, start: Starter, draw: Draw, model: Path, tmp_path: Path, name: str, page: int
) -> None:
    """Five prompts share two pages, and have two of their own: those of the two oldest go, and nothing else."""
    folder = tmp_path / name
    await asyncio.to_thread(make_kind, name, folder, model / "tokenizer.json")
    cache = start.cache(grace_ms=60_000)
    tight = {"pool_pages": 14, "max_model_len": 13 * page, "max_decode_ahead_tokens": 0, "decode_ahead_tokens": 0}
    worker = (await asyncio.to_thread(start.workers, cache.address, model=folder, window_share=1, **tight))[0]
    shared = draw(2 * page)
    prompts = [shared + draw(2 * page + 5) for _ in range(5)]
    for prompt in prompts:
        await client.generate(worker.address, prompt, 1)
    running = Running(client, worker.address, [draw(page + 10)], 5 * page - 20)
    await stream_through_an_outage(client, cache, worker, running)
    again = list(reversed(prompts))
    cached = [await client.generate(worker.address, prompt) for prompt in again]
    assert [each.usage.cached_tokens // page for each in cached] == [4, 4, 4, 2, 2]
    for prompt, answer in zip(again, cached, strict=True):
        assert answer.varied_tokens == (await client.cold(worker.address, prompt)).tokens
    await running.check()


async def test_the_window_of_a_shared_start_stays_cached_through_an_outage(
    client: Client, start: Starter, draw: Draw, model: Path, tmp_path: Path
) -> None:
    """It was computed before all else and used last; streams shorter than a window leave nothing behind to take."""
    await asyncio.to_thread(make_kind, "gemma3", tmp_path, model / "tokenizer.json")
    cache = start.cache(grace_ms=60_000)
    tight = {"pool_pages": 64, "window_share": 1, "max_model_len": 60 * PAGE, "max_num_seqs": 4}
    tight |= {"max_decode_ahead_tokens": 0, "decode_ahead_tokens": 0}
    worker = (await asyncio.to_thread(start.workers, cache.address, model=tmp_path, **tight))[0]
    shared = draw(8 * PAGE)

    others = [draw(8 * PAGE + 3) for _ in range(7)]
    for prompt in [shared + draw(6), shared + draw(6), *others, shared + draw(6), shared + draw(6)]:
        last = await client.generate(worker.address, prompt, 1)
    assert last.usage.cached_tokens == 8 * PAGE
    running = Running(client, worker.address, [draw(4), draw(4)], 90)
    await stream_through_an_outage(client, cache, worker, running)
    again = shared + draw(6)
    answer = await client.generate(worker.address, again)
    assert answer.usage.cached_tokens == 8 * PAGE
    assert answer.varied_tokens == (await client.cold(worker.address, again)).tokens
    await running.check()


async def stream_through_an_outage(
    client: Client, cache: ServiceProcess, worker: ServiceProcess, running: Running
) -> None:
    """Freezes the cache service while the streams decode, until all have ended, then waits for the adoption."""
    await running.decoding.wait()
    cache.freeze()
    await asyncio.gather(*running.tasks)
    assert "streams take pages by themselves" in worker.logged()
    cache.thaw()
    await client.until(cache.address, lambda stats: len(stats.workers) == 1 and healthy(stats))


def num_free(stats: cache_pb2.StatsResponse) -> int:
    (group,) = stats.workers[0].groups
    return group.num_free


def num_taken(stats: cache_pb2.StatsResponse) -> int:
    (group,) = stats.workers[0].groups
    return group.num_pages - group.num_free


async def test_after_a_restart_of_the_cache_service_an_older_process_does_not_replace_a_newer_one(
    client: Client, start: Starter, draw: Draw
) -> None:
    """The older one stood still while a new one took its name, and wakes up when nobody remembers that."""
    cache = start.cache()
    (older,) = start.workers(cache.address)
    older.freeze()
    (newer,) = await asyncio.to_thread(start.workers, cache.address)
    cache.kill()
    cache.settings["listen"] = cache.address
    await asyncio.to_thread(cache.start)
    await client.until(cache.address, lambda stats: [w.connected for w in stats.workers] == [True])
    older.thaw()
    assert await asyncio.to_thread(older.wait, 60) != 0
    assert "started" in older.logged() and "later is here" in older.logged()
    (worker,) = (await client.stats(cache.address)).workers
    assert (worker.incarnation, worker.connected) == (newer.announced["incarnation"], True)
    assert (await client.generate(newer.address, draw(40))).usage.generated_tokens == 8
