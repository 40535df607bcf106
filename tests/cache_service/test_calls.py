"""Every call of PrefixCache over real gRPC and with the real manager: what it answers when all is well."""

from __future__ import annotations

import grpc
import pytest

from protos.v1 import cache_pb2, types_pb2
from tests.cache_service.peer import Client, Clock, Peer, started, until
from tests.core import audit
from tests.core.snapshot import snapshot
from tests.rpc.echo import code_of
from tests.session.messages import (
    MODEL,
    PAGE,
    acquire,
    full_adopt,
    hello,
    namespace,
    publish,
    release,
    tokens,
    u32,
    u64,
)

PROMPT = tokens(40)
CONNECTED = cache_pb2.WorkerConnection(worker_id="w1", endpoint="127.0.0.1:7500", is_connected=True)
GONE = cache_pb2.WorkerConnection(worker_id="w1", endpoint="127.0.0.1:7500")


async def cached(client: Client, prompt: bytes = PROMPT, salt: str = "") -> Peer:
    """A worker that has computed, published and released the prompt."""
    peer = await client.connected()
    await peer.step(acquires=[acquire(1, prompt, salt)])
    await peer.step(publishes=[publish(1, len(prompt) // 4)], releases=[release(1)])
    audit.check(client.manager)
    return peer


async def test_a_repeated_prompt_is_granted_its_cached_pages() -> None:
    async with started() as client:
        peer = await client.connected()
        first = (await peer.step(acquires=[acquire(1, PROMPT)])).grants[0]
        assert (first.usable_tokens, len(first.tables[0].page_ids)) == (0, 4 * 3)
        await peer.step(publishes=[publish(1, 40)])
        second = (await peer.step(acquires=[acquire(2, PROMPT)])).grants[0]
        assert (second.usable_tokens, second.cached_tokens, second.fetched_tokens) == (32, 32, 0)
        assert second.tables[0].page_ids[:8] == first.tables[0].page_ids[:8]
        assert second.tables[0].page_ids[8:] != first.tables[0].page_ids[8:]
        audit.check(client.manager)


async def test_extends_publishes_and_remaps() -> None:
    async with started() as client:
        peer = await client.connected()
        twins = await peer.step(acquires=[acquire(1, PROMPT), acquire(2, PROMPT)])
        tables = [grant.tables[0].page_ids for grant in twins.grants]
        reply = await peer.step(
            publishes=[publish(1, 40), publish(2, 40)],
            extends=cache_pb2.Extends(sequence_ids=u64([1, 2]), num_tokens=u32([64, 65])),
        )
        assert reply.extends.sequence_ids == u64([1, 2])
        assert (reply.extends.first_pages, reply.extends.num_pages) == (u32([3, 3]), u32([1, 2]))
        assert len(reply.extends.page_ids) == 4 * 3
        remap = reply.remaps[0]
        assert (remap.sequence_id, remap.pages[0].first_page) == (2, 0)
        assert remap.pages[0].page_ids == tables[0][:8]
        audit.check(client.manager)


async def test_refusals_are_values() -> None:
    async with started() as client:
        peer = await client.connected(num_pages=4)
        reply = await peer.step(acquires=[acquire(1, tokens(PAGE * 3)), acquire(2, tokens(PAGE * 3, 900))])
        assert [grant.sequence_id for grant in reply.grants] == [1]
        assert [(r.sequence_id, r.reason) for r in reply.refusals] == [(2, types_pb2.REFUSAL_REASON_NO_ROOM)]
        reply = await peer.step(acquires=[acquire(3, tokens(PAGE * 9))])
        assert reply.refusals[0].reason == types_pb2.REFUSAL_REASON_NEVER_FITS
        audit.check(client.manager)


async def test_a_repeated_step_id_is_answered_and_not_applied_again() -> None:
    async with started() as client:
        peer = await client.connected()
        first = await peer.step(acquires=[acquire(1, PROMPT)])
        before = snapshot(client.manager)
        assert await peer.step(step_id=1, acquires=[acquire(1, PROMPT)]) == first
        assert snapshot(client.manager) == before


async def test_a_stream_that_was_cut_goes_on_where_it_was() -> None:
    async with started() as client:
        peer = await client.connected()
        first = await peer.step(acquires=[acquire(7, PROMPT)])
        peer.stream.cancel()
        await until(lambda: not client.manager.stats().workers[0].connected)
        again = client.peer()
        welcome = await again.hello(generation=peer.generation)
        assert (welcome.generation, welcome.last_step_id) == (peer.generation, 1)
        assert await again.step(step_id=1, acquires=[acquire(7, PROMPT)]) == first
        assert (await again.step(step_id=2, publishes=[publish(7, 40)], releases=[release(7)])).step_id == 2
        audit.check(client.manager)


async def test_a_worker_that_stays_away_is_forgotten_after_its_grace() -> None:
    clock = Clock()
    async with started(clock=clock, tick_ms=5, grace_ms=1_000) as client:
        await (await cached(client)).hang_up()
        clock.now_ms += 999
        await client.stub.Stats(cache_pb2.StatsRequest())
        assert len(client.manager.stats().workers) == 1
        clock.now_ms += 1
        await until(lambda: not client.manager.stats().workers)


async def test_a_new_incarnation_supersedes_the_old_one() -> None:
    async with started() as client:
        older = await cached(client)
        newer = await client.connected(incarnation="second")
        assert (await older.ended())[0] is grpc.StatusCode.ABORTED
        late = client.peer()
        await late.send(hello=hello())
        code, details = await late.ended()
        assert code is grpc.StatusCode.ABORTED
        assert details.startswith("hello.incarnation: ")
        await newer.step()
        assert client.manager.stats().workers[0].num_nodes == 0


async def test_adopt_after_a_restart() -> None:
    async with started() as client:
        peer = await client.connected()
        adopt = full_adopt()
        adopt.ClearField("working")
        adopt.ClearField("rolling")
        (grant,) = (await peer.step(adopts=[adopt])).grants
        assert grant.sequence_id == 5
        audit.check(client.manager)
        hit = (await peer.step(acquires=[acquire(6, tokens(20))])).grants[0]
        assert hit.cached_tokens == 16


async def test_goodbye_forgets_the_worker() -> None:
    async with started() as client:
        peer = await cached(client)
        await peer.send(goodbye=cache_pb2.Goodbye())
        assert (await peer.ended())[0] is grpc.StatusCode.OK
        assert client.manager.stats().workers == ()


async def test_match_says_how_far_and_why_not_further() -> None:
    async with started() as client:
        await cached(client)
        for worker_id in ("", "w1"):
            request = cache_pb2.MatchRequest(namespace=namespace(), tokens=tokens(60), worker_id=worker_id)
            (worker,) = (await client.stub.Match(request)).workers
            assert (worker.worker_id, worker.endpoint) == ("w1", "127.0.0.1:7500")
            assert (worker.match.matched_tokens, worker.match.usable_tokens) == (32, 32)
            assert worker.match.miss_reason == types_pb2.MISS_REASON_NEVER_SEEN
        request = cache_pb2.MatchRequest(namespace=namespace(), tokens=PROMPT, worker_id="other")
        assert (await code_of(client.stub.Match(request)))[0] is grpc.StatusCode.NOT_FOUND


async def test_only_explain_speaks_of_other_salts() -> None:
    async with started() as client:
        peer = await cached(client, salt="tenant-1")
        asked = {"namespace": namespace("tenant-2"), "tokens": PROMPT}
        (match,) = (await client.stub.Match(cache_pb2.MatchRequest(**asked))).workers
        assert (match.match.usable_tokens, match.match.miss_reason) == (0, types_pb2.MISS_REASON_NEVER_SEEN)
        (told,) = (await client.stub.Explain(cache_pb2.ExplainRequest(**asked))).workers
        assert told.match.miss_reason == types_pb2.MISS_REASON_OTHER_SALT
        granted = (await peer.step(acquires=[acquire(9, PROMPT, "tenant-2")])).grants[0]
        assert granted.match.miss_reason == types_pb2.MISS_REASON_NEVER_SEEN


async def test_explain_tells_how_long_ago_pages_were_used_and_evicted() -> None:
    clock = Clock()
    async with started(clock=clock, tick_ms=5) as client:
        peer = await client.connected(num_pages=4)
        await peer.step(acquires=[acquire(1, PROMPT)])
        await peer.step(publishes=[publish(1, 40)])
        asked = cache_pb2.ExplainRequest(namespace=namespace(), tokens=PROMPT)
        (told,) = (await client.stub.Explain(asked)).workers
        assert [(s.HasField("last_used"), s.last_used.most_ms) for s in told.segments] == [(True, 0), (False, 0)]
        await peer.step(releases=[release(1)])
        clock.now_ms += 42_000
        (told,) = (await client.stub.Explain(asked)).workers
        assert told.segments[0].last_used == cache_pb2.Age(least_ms=42_000, most_ms=42_000)
        assert not any(segment.HasField("gone") for segment in told.segments)
        await until(lambda: client.manager.workers["w1"].cache.now_ms == clock.now_ms)
        other = tokens(PAGE * 4, 900)
        await peer.step(acquires=[acquire(2, other)], publishes=[])
        clock.now_ms += 7_000
        (told,) = (await client.stub.Explain(asked)).workers
        assert told.match.miss_reason == types_pb2.MISS_REASON_EVICTED
        assert 0 <= told.segments[0].gone.least_ms <= 7_000 <= told.segments[0].gone.most_ms <= 49_000


async def test_stats_add_up() -> None:
    async with started() as client:
        peer = await cached(client)
        await peer.step(acquires=[acquire(2, PROMPT)])
        stats = await client.stub.Stats(cache_pb2.StatsRequest())
        (worker,) = stats.workers
        assert stats.epoch == client.service.epoch
        assert (worker.num_requests, worker.prompt_tokens) == (2, 80)
        assert (worker.cached_tokens, worker.fetched_tokens, worker.computed_tokens) == (32, 0, 48)
        assert (worker.num_leases, worker.connected, worker.model) == (1, True, MODEL)
        assert dict(worker.misses) == {"never_seen": 1, "page_tail": 1}
        (group,) = worker.groups
        assert (group.num_pages, group.num_free, group.num_evictable) == (64, 61, 0)


async def test_pin_counts_the_cached_tokens() -> None:
    async with started() as client:
        await cached(client)
        for ttl_ms in (60_000, 0):
            pinned = await client.admin.Pin(
                cache_pb2.PinRequest(namespace=namespace(), tokens=tokens(60), ttl_ms=ttl_ms)
            )
            assert pinned.pinned_tokens == 32
        too_long = cache_pb2.PinRequest(namespace=namespace(), tokens=PROMPT, ttl_ms=2**63)
        assert await code_of(client.admin.Pin(too_long)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"request.ttl_ms: is {2**63}; must be 0..86400000",
        )


@pytest.mark.parametrize("scope", [None, namespace()])
async def test_clear_takes_what_nobody_holds(scope: types_pb2.Namespace | None) -> None:
    async with started() as client:
        peer = await cached(client)
        await peer.step(acquires=[acquire(2, tokens(20))])
        before = snapshot(client.manager)
        refused = await code_of(client.admin.Clear(cache_pb2.ClearRequest(namespace=scope)))
        assert refused[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert snapshot(client.manager) == before
        cleared = await client.admin.Clear(cache_pb2.ClearRequest(namespace=scope, unused_only=True))
        assert cleared.num_pages == 1
        await peer.step(releases=[release(2)])
        assert (await client.admin.Clear(cache_pb2.ClearRequest(namespace=scope))).num_pages == 1
        audit.check(client.manager)


async def test_watch_tells_what_is_stored_and_removed() -> None:
    async with started() as client:
        watch = client.stub.Watch(cache_pb2.WatchRequest())
        start = await watch.read()
        assert (start.epoch, start.seq, start.WhichOneof("event")) == (client.service.epoch, 0, None)
        peer = await cached(client, salt="s")
        begun = await watch.read()
        assert (begun.seq, begun.connection) == (1, CONNECTED)
        stored = await watch.read()
        assert (stored.seq, stored.stored.worker_id, stored.stored.group) == (2, "w1", 0)
        assert (stored.stored.parent_hash, stored.stored.tokens) == (b"", tokens(32))
        assert stored.stored.namespace == namespace("s")
        assert [len(page_hash) for page_hash in stored.stored.page_hashes] == [32, 32]
        await client.admin.Clear(cache_pb2.ClearRequest(namespace=namespace("s")))
        removed = await watch.read()
        assert removed.seq == 3
        assert set(removed.removed.page_hashes) == set(stored.stored.page_hashes)
        await client.admin.Clear(cache_pb2.ClearRequest())
        assert (await watch.read()).cleared == cache_pb2.CacheCleared()
        await peer.send(goodbye=cache_pb2.Goodbye())
        assert (await watch.read()).connection == GONE
        assert (await watch.read()).cleared.worker_id == "w1"
        watch.cancel()


async def test_watch_tells_of_a_worker_that_disconnects_and_is_back() -> None:
    """Within its grace period: what it holds stays."""
    async with started() as client:
        peer = await cached(client)
        watch = client.stub.Watch(cache_pb2.WatchRequest(present_state=True))
        assert [(await watch.read()).WhichOneof("event") for _ in range(4)] == PRESENT
        peer.stream.cancel()
        assert (await watch.read()).connection == GONE
        again = await client.connected(generation=peer.generation)
        assert again.generation == peer.generation
        assert (await watch.read()).connection == CONNECTED
        watch.cancel()


PRESENT = [None, "connection", "stored", "present_state_end"]


async def test_a_watcher_that_comes_late_is_told_what_is_cached() -> None:
    async with started(max_present_states=1) as client:
        await cached(client, salt="s")
        early = client.stub.Watch(cache_pb2.WatchRequest())
        seq = (await early.read()).seq
        watch = client.stub.Watch(cache_pb2.WatchRequest(present_state=True))
        messages = [await watch.read() for _ in range(4)]
        assert [message.WhichOneof("event") for message in messages] == PRESENT
        assert {message.seq for message in messages} == {seq}
        _, connection, stored, end = messages
        assert connection.connection == CONNECTED
        assert (stored.stored.tokens, stored.stored.parent_hash) == (tokens(32), b"")
        assert (stored.stored.namespace, len(stored.stored.page_hashes)) == (namespace("s"), 2)
        assert end.present_state_end.num_pages == 2
        await client.admin.Clear(cache_pb2.ClearRequest(namespace=namespace("s")))
        for one in (early, watch):
            removed = await one.read()
            assert removed.seq == seq + 1
            assert set(removed.removed.page_hashes) == set(stored.stored.page_hashes)
            one.cancel()


async def test_a_watcher_that_lags_is_told_what_it_lost() -> None:
    async with started(watch_queue=4) as client:
        watch = client.stub.Watch(cache_pb2.WatchRequest())
        await watch.read()
        peer = await client.connected(num_pages=4_000)
        # Large events fill the connection's buffers, then the queue of four.
        for number in range(1, 41):
            prompt = tokens(16_000, number * 20_000)
            await peer.step(acquires=[acquire(number, prompt)])
            await peer.step(publishes=[publish(number, 16_000)], releases=[release(number)])
        seen = lost = 0
        while seen + lost < client.service.watchers.seq:
            message = await watch.read()
            kind = message.WhichOneof("event")
            seen, lost = (seen, lost + message.lost.num_events) if kind == "lost" else (seen + 1, lost)
            assert message.seq == seen + lost
        assert lost > 0
        watch.cancel()


async def test_watch_can_be_off() -> None:
    async with started(watch=False) as client:
        watch = client.stub.Watch(cache_pb2.WatchRequest())
        assert (await watch.code(), await watch.details()) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "watch: is off in this service's settings",
        )


async def test_a_watcher_that_goes_away_is_forgotten() -> None:
    async with started(max_watchers=1) as client:
        for _ in range(3):
            watch = client.stub.Watch(cache_pb2.WatchRequest())
            await watch.read()
            one_more = client.stub.Watch(cache_pb2.WatchRequest())
            assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            watch.cancel()
            await until(lambda: len(client.service.watchers) == 0)
