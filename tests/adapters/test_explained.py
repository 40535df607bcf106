"""Why an attached engine finds nothing: asked over gRPC and by `stemcache`, of a real cache service and a real Redis.

The engines are vLLM's connector without vLLM, and clients of the host tier.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from adapters.vllm.layout import GroupLayout
from adapters.vllm.scheduler_side import SAVE_S, Scheduled
from adapters.vllm.settings import Settings
from adapters.vllm.tier_clients import make_index, make_store
from cli.__main__ import app
from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from tests.adapters.stage import FULL, PAGE_TOKENS, WINDOW, FakeRequest, Stage, layout
from tests.cli.command import stemcache
from tests.tier_client.conftest import staged
from tests.tier_client.stage import FULL as PAGES
from tests.tier_client.stage import Stage as Services
from tests.tier_client.stage import all_pages, path, payload

TOKENS = list(range(5 * PAGE_TOKENS + 2))


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with staged(tmp_path) as services:
        yield services


def explain(services: Services, **fields: Any) -> list[Any]:
    with grpc.insecure_channel(str(services.cache.settings["listen"])) as channel:
        stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)
        return list(stub.Explain(cache_pb2.ExplainRequest(**fields), timeout=20).attachments)


def command(services: Services, folder: Path, *arguments: str) -> str:
    done = stemcache(folder, *arguments, "--cache", str(services.cache.settings["listen"]))
    assert done.returncode == 0, done.stderr
    return done.stdout


def vllm(services: Services, fingerprint: bytes, *groups: GroupLayout) -> Stage:
    settings = Settings(
        cache=str(services.cache.settings["listen"]),
        redis=services.redis.url,
        call_timeout_s=20.0,
        store_timeout_s=20.0,
        pause_s=0.01,
    )
    spec = layout(*groups)
    index = make_index(settings, spec, 1, engine="vllm 0.33.0", fingerprint=fingerprint, model="model")
    stage = Stage(spec, index=index, stores=[make_store(settings, spec, 0)])
    services.stack.callback(stage.close)
    return stage


def test_an_engine_with_another_fingerprint_is_told_so(services: Services, tmp_path: Path) -> None:
    """The common mistake: two engines that were meant to share, and do not."""
    writer, reader = vllm(services, b"f" * 32, FULL, WINDOW), vllm(services, b"g" * 32, FULL, WINDOW)
    blocks = [list(range(1, 7)), list(range(7, 13))]
    writer.compute(FakeRequest("a", TOKENS), blocks)
    assert reader.matched(FakeRequest("b", TOKENS)) == 0
    stats = services.stats().attachments
    assert [(one.num_lookups, one.committed_pages) for one in stats.engines] == [(1, 5), (1, 0)]
    (told,) = explain(services, attachment=2)
    assert (told.num_pages, told.usable_pages, told.miss_reason) == (5, 0, types_pb2.MISS_REASON_NEVER_SEEN)
    assert any("sharing no page with it: attachment 1." in note for note in told.notes)
    request = FakeRequest("c", TOKENS)
    both = explain(services, namespace=types_pb2.Namespace(model="model"), page_ids=b"".join(request.block_hashes))
    assert [(one.usable_pages, one.usable_tokens) for one in both] == [(5, 5 * PAGE_TOKENS), (0, 0)]
    assert [group.kind for group in both[0].groups] == [types_pb2.GROUP_KIND_FULL, types_pb2.GROUP_KIND_WINDOW]
    shown = " ".join(command(services, tmp_path, "explain", "--attachment", "2").split())
    assert "attachment 2 (vllm 0.33.0): its lookup of" in shown and "0 (0 tokens) can be used" in shown
    assert "never seen" in shown and "sharing no page with it: attachment 1." in shown
    ids = ",".join(one.hex() for one in request.block_hashes)
    told = json.loads(command(services, tmp_path, "explain", "--page-ids", ids, "--json"))["attachments"]
    assert [one["usable_pages"] for one in told] == [5, 0]
    assert "missing_page" not in told[0]["groups"][0] and told[1]["groups"][0]["missing_page"] == 0
    status = " ".join(command(services, tmp_path, "status").split())
    assert "vllm 0.33.0 never seen: 1 2 1 5 0 0.0%" in status


def test_a_save_that_an_engine_gives_up_ends_its_ticket_and_is_told(services: Services) -> None:
    engine, blocks = vllm(services, b"f" * 32), [list(range(1, 7))]
    engine.scheduler.matched_tokens(FakeRequest("a", TOKENS), 0)
    engine.scheduler.step([Scheduled("a", 0, len(TOKENS), blocks)], ())
    engine.thread.run()
    assert services.stats().attachments.num_tickets == 1
    engine.clock = SAVE_S + 1
    assert not engine.scheduler.has_open_saves()
    engine.thread.run()
    stats = services.stats().attachments
    assert (stats.num_tickets, stats.given_up_pages, stats.num_expired_tickets) == (0, 5, 0)
    assert engine.matched(FakeRequest("b", TOKENS)) == 0
    (told,) = explain(services, attachment=1)
    assert (told.miss_reason, told.groups[0].missing_page) == (types_pb2.MISS_REASON_NOT_WRITTEN, 0)
    engine.compute(FakeRequest("c", TOKENS), blocks)
    assert engine.matched(FakeRequest("d", TOKENS)) == 5 * PAGE_TOKENS


def test_a_full_redis_is_told(services: Services) -> None:
    client = services.client()
    assert client.save(path("ab"), all_pages(2), payload) == 2, "what opens the connections counts as used memory too"
    with services.redis.client() as redis:
        redis.config_set("maxmemory-policy", "noeviction")
        redis.config_set("maxmemory", 1)
        assert client.save(path("wxyz"), all_pages(4), payload) == 0
        redis.config_set("maxmemory", 0)
    assert client.fetch(path("wxyz")).usable_pages == 0
    (told,) = explain(services, attachment=1)
    assert (told.miss_reason, told.groups[0].missing_page) == (types_pb2.MISS_REASON_REFUSED, 0)
    engine = services.stats().attachments.engines[0]
    assert (engine.reserved_pages, engine.committed_pages, engine.refused_pages) == (6, 2, 4)
    assert dict(engine.misses) == {"refused": 1}


@pytest.mark.parametrize("fault", ["lost", "damaged"])
def test_a_value_that_is_gone_or_wrong_is_told(services: Services, fault: str) -> None:
    client = services.client()
    client.save(path("abcd"), all_pages(4), payload)
    with services.redis.client() as redis:
        hit = client.calls.lookup(path("abcd"), 0)
        assert hit is not None
        key = hit.pages[0].keys(0)[2]
        redis.delete(key) if fault == "lost" else redis.setrange(key, 70, b"\xff\xfe\xfd")
    assert client.fetch(path("abcd")).usable_pages == 2
    page_ids = path("abcd").page_ids
    (told,) = explain(services, namespace=types_pb2.Namespace(model="model"), page_ids=page_ids)
    assert (told.usable_pages, told.groups[0].missing_page) == (2, 2)
    assert told.miss_reason == types_pb2.MissReason.Value(f"MISS_REASON_{fault.upper()}")
    client.save(path("abcd"), all_pages(4), payload)
    loaded = client.fetch(path("abcd"))
    assert loaded.usable_pages == 4
    assert [bytes(loaded.values[0][page]) for page in range(4)] == [payload(0, page) for page in range(4)]
    assert PAGES.page_bytes == len(loaded.values[0][0])


def test_a_dead_redis_is_told_and_nothing_is_hit(services: Services) -> None:
    client = services.client()
    client.save(path("ab"), all_pages(2), payload)
    services.redis.kill()
    while not services.stats().host_tier.breaker_open:
        client.fetch(path("ab"))
    (told,) = explain(services, attachment=1, page_ids=path("ab").page_ids)
    assert (told.usable_pages, told.miss_reason) == (0, types_pb2.MISS_REASON_BREAKER_OPEN)
    assert told.groups[0].leading_pages == 2


def test_the_command_refuses_what_makes_no_sense(services: Services, tmp_path: Path) -> None:
    one_id = "ab" * 32
    cases = {
        ("explain",): "give a prompt, --attachment or --page-ids",
        ("explain", "x", "--attachment", "1"): "goes with neither --attachment nor --page-ids",
        ("explain", "--page-ids", one_id, "--worker", "127.0.0.1:1"): "goes with neither --attachment nor --page-ids",
        ("explain", "x", "--adapter", "a"): "goes with --page-ids",
        ("explain", "--page-ids", one_id[:-1]): "is no id of 64 hexadecimal digits",
        ("explain", "--page-ids", ", "): "has no id",
        ("explain", "--attachment", "1", "--salt", "s"): "goes with --page-ids",
        ("explain", "--attachment", "9"): "error: NOT_FOUND: request.attachment: 9 is not attached",
    }
    address = str(services.cache.settings["listen"])
    for arguments, error in cases.items():
        done = stemcache(tmp_path, *arguments, "--cache", address, COLUMNS="200")
        assert done.returncode != 0 and error in done.stderr, done.stderr
    assert "no engine is attached" in command(services, tmp_path, "explain", "--page-ids", one_id)


def test_page_ids_that_are_no_text_are_refused() -> None:
    done = CliRunner().invoke(app, ["explain", "--page-ids", "-"], input=b"\xff\xfe", env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "stdin is not UTF-8 (byte 0)" in done.output
