"""What the doctor makes of a Redis, and how fast it is where nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.checkup import judge_redis, look_at_services
from cli.client import StemcacheClient
from protos.v1 import cache_pb2, worker_pb2
from rpc.version import package_version
from tests.cli.command import one_object, stemcache

GIB = 1 << 30


@pytest.mark.parametrize(
    ("used", "limit", "policy", "ok", "said"),
    [
        (GIB // 2, GIB, "noeviction", True, "512.0 MiB of 1,024.0 MiB"),
        (GIB, GIB, "noeviction", None, "nearly full"),
        (GIB // 2, GIB, "allkeys-lru", None, "noeviction keeps"),
        (GIB // 2, 0, "noeviction", None, "no maxmemory"),
    ],
)
def test_a_redis_is_judged_by_its_memory_and_its_policy(
    used: int, limit: int, policy: str, ok: bool | None, said: str
) -> None:
    info = {"redis_version": "7.2.4", "used_memory": used, "maxmemory": limit, "maxmemory_policy": policy}
    found = judge_redis(info)
    assert found.ok is ok
    assert "7.2.4" in found.seen
    assert said in found.seen + found.advice


def test_the_doctor_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')\n")
    done = stemcache(tmp_path, "doctor", "--json", PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    assert done.returncode == 0, done.stderr
    assert {"services", "ports", "packages"} <= {finding["what"] for finding in one_object(done.stdout)["findings"]}


async def test_another_version_of_a_service_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As this command finds a newer cache service, and a worker from before versions were told."""

    async def stats(_: StemcacheClient) -> cache_pb2.StatsResponse:
        return cache_pb2.StatsResponse(version="9.8.7")

    async def describe(_: StemcacheClient, address: str) -> worker_pb2.DescribeResponse:
        own = "" if address.endswith(":2") else package_version()
        return worker_pb2.DescribeResponse(worker_id=f"worker-{address[-1]}", cache_epoch="e", version=own)

    async def is_serving(_: StemcacheClient, address: str) -> bool:
        return True

    for method in (stats, describe, is_serving):
        monkeypatch.setattr(StemcacheClient, method.__name__, method)
    monkeypatch.setenv("STEMCACHE_CACHE", "127.0.0.1:1")
    monkeypatch.setenv("STEMCACHE_WORKERS", "127.0.0.1:2,127.0.0.1:3")
    told = [found for found in await look_at_services("") if found.what == "version"]
    assert [(found.ok, found.seen) for found in told] == [
        (None, f"the cache service is 9.8.7, this command is {package_version()}"),
        (None, f"worker-2 is of an older version, this command is {package_version()}"),
    ]
