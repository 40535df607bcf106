"""A real SGLang on a real cache service and a real Redis. STEMCACHE_SGLANG names the interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.v1 import cache_pb2, cache_pb2_grpc
from tests.e2e.processes import ServiceProcess, cache_process
from tests.redis_process import RedisProcess, find_redis_binary, free_port

PYTHON, MODEL = os.environ.get("STEMCACHE_SGLANG", ""), os.environ.get("STEMCACHE_SGLANG_MODEL", "")
ROOT = Path(__file__).parents[2]
PAGE_TOKENS = 16
PROMPT = [3 + (i * 7) % 200 for i in range(401)]
PAGES = 400 // PAGE_TOKENS
VALUES = "stemcache:1:*:*"

pytestmark = [
    pytest.mark.skipif(not (PYTHON and MODEL), reason="STEMCACHE_SGLANG or STEMCACHE_SGLANG_MODEL is not set"),
    pytest.mark.timeout(900),
]


class Engine:
    def __init__(self, cache: str, redis: str) -> None:
        command = [PYTHON, "-m", "tests.adapters.sglang_engine", MODEL, cache, redis]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("STEMCACHE_SGLANG_PATH", "")]))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        assert self._next()["ready"]

    def _next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                said: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return said
        raise AssertionError("the engine has ended")

    def ask(self, **asked: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return self._next()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Stage:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        binary = find_redis_binary()
        assert binary is not None
        self.redis = stack.enter_context(RedisProcess(binary))
        listen = f"127.0.0.1:{free_port()}"
        self.cache: ServiceProcess = cache_process(folder, listen=listen, redis_url=self.redis.url, tick_ms=10)
        stack.callback(self.cache.kill)
        self.cache.start()
        self._stack = stack

    def engine(self) -> Engine:
        engine = Engine(self.cache.address, self.redis.url)
        self._stack.callback(engine.end)
        return engine

    def attachments(self) -> cache_pb2.AttachmentStats:
        with grpc.insecure_channel(self.cache.address) as channel:
            return cache_pb2_grpc.PrefixCacheStub(channel).Stats(cache_pb2.StatsRequest()).attachments

    def flip_a_bit(self) -> None:
        """In the value of every page."""
        with self.redis.client() as redis:
            for key in redis.scan_iter(VALUES):
                value = redis.get(key)
                assert isinstance(value, bytes)
                redis.set(key, value[:-1] + bytes([value[-1] ^ 1]), keepttl=True)

    def drop_half(self) -> None:
        with self.redis.client() as redis:
            keys = sorted(redis.scan_iter(VALUES))
            assert len(keys) > 1
            redis.delete(*keys[::2])

    def wait_for_pages(self, count: int) -> None:
        """Offloads are told to SGLang's scheduler, not to its callers."""
        deadline = time.monotonic() + 60
        while self.attachments().committed_pages < count:
            assert time.monotonic() < deadline, self.attachments()
            time.sleep(0.05)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(tmp_path, stack)


def test_what_one_engine_computed_another_one_finds(stage: Stage) -> None:
    first = stage.engine()
    cold = first.ask(prompt=PROMPT)
    assert (cold["cached"], cold["host"]) == (0, 0)
    stage.wait_for_pages(PAGES)
    assert first.ask(flush=True)["flushed"]
    warm = first.ask(prompt=PROMPT)
    assert (warm["tokens"], warm["host"]) == (cold["tokens"], PAGES * PAGE_TOKENS)
    other_tenant = first.ask(prompt=PROMPT, salt="tenant")
    assert (other_tenant["tokens"], other_tenant["cached"]) == (cold["tokens"], 0)
    usable = stage.attachments().usable_pages
    assert usable == PAGES
    first.end()

    second = stage.engine()
    found = second.ask(prompt=PROMPT)
    assert (found["tokens"], found["host"]) == (cold["tokens"], PAGES * PAGE_TOKENS)
    assert stage.attachments().usable_pages == usable + PAGES

    for damage in (stage.flip_a_bit, stage.drop_half):
        damage()
        assert second.ask(flush=True)["flushed"]
        harmed = second.ask(prompt=PROMPT)
        assert (harmed["ended"], harmed["tokens"]) == ("length", cold["tokens"])
        assert harmed["host"] < PAGES * PAGE_TOKENS


def test_without_the_tier_it_computes(stage: Stage) -> None:
    engine = stage.engine()
    cold = engine.ask(prompt=PROMPT)
    stage.wait_for_pages(PAGES)
    stage.cache.kill()
    assert engine.ask(flush=True)["flushed"]
    alone = engine.ask(prompt=PROMPT)
    assert (alone["tokens"], alone["cached"], alone["ended"]) == (cold["tokens"], 0, "length")
    stage.redis.kill()
    other = engine.ask(prompt=PROMPT[::-1])
    assert (other["cached"], other["ended"]) == (0, "length")
