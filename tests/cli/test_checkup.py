"""What the doctor makes of a Redis, and how fast it is where nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.checkup import judge_redis
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
