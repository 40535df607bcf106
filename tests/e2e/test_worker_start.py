"""What a worker says when it cannot start, and what it tells of itself when it can."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from protos.v1 import worker_pb2
from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.running import Draw
from tests.redis_process import RedisProcess


def run_worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker_service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_names_every_setting_and_ends_well() -> None:
    result = run_worker("--help")
    assert result.returncode == 0
    for flag in ("--model", "--cache", "--redis-url", "--token-budget", "--long-prefill-token-threshold"):
        assert flag in result.stdout


# What `python -m worker_service` calls, again and again in one process: PyTorch is then imported once.
MAINS = """
import contextlib, io, json, sys
from worker_service.__main__ import main
for line in sys.stdin:
    sys.argv[1:] = json.loads(line)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main()
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


class Ended(NamedTuple):
    returncode: int
    stderr: str


Start = Callable[..., Ended]


@pytest.fixture(scope="module")
def start_main() -> Iterator[Start]:
    """Starts a worker that cannot work, and says how it ended."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", MAINS], text=True, bufsize=1, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None and process.stdout is not None

        def start(*arguments: str) -> Ended:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            return Ended(*json.loads(process.stdout.readline()))

        yield start
        process.stdin.close()


def test_a_model_that_is_not_there_ends_the_process() -> None:
    """The one case that goes through a process of its own."""
    result = run_worker("--device", "cpu", "--listen", "127.0.0.1:0", "--model", "/no/such/folder")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("worker_service: error: model: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--modle", "m"], "--modle"),
        (["--page-tokens", "-1"], "--page-tokens"),
        (["--model", "/no/such/folder"], "model"),
        (["--pool-pages", "10"], "max_model_len"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--token-budget", "8"], "token_budget"),
        (["--long-prefill-token-threshold", "8"], "long_prefill_token_threshold"),
        (["--host-tier", "redis", "--redis-url", "redis://:word@host:port/0"], "redis_url"),
        (["--listen", "127.0.0.1:99999"], "listen"),
    ],
)
def test_a_setting_that_cannot_work_is_named(start_main: Start, model: Path, arguments: list[str], named: str) -> None:
    given = [] if "--model" in arguments else ["--model", str(model)]
    result = start_main("--device", "cpu", "--listen", "127.0.0.1:0", *given, *arguments)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("worker_service: error:")
    assert named in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "word" not in result.stderr


@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_that_lacks_or_spoils_a_file_is_told_by_the_files_name(
    start_main: Start, model: Path, tmp_path: Path, broken: str
) -> None:
    for spoil in (lambda path: path.unlink(), lambda path: path.write_bytes(b"\x00 no such thing")):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(model, folder)
        spoil(folder / broken)
        result = start_main("--device", "cpu", "--model", str(folder))
        assert result.returncode == 2
        assert broken in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr


def read_metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        return str(response.read().decode())


async def test_settings_and_secrets_in_logs_and_describe(
    client: Client, start: Starter, redis: RedisProcess, draw: Draw
) -> None:
    cache = start.cache(redis_url=redis.url)
    worker = start.workers(
        cache.address, host_tier="redis", redis_url=redis.url, metrics_listen="127.0.0.1:0", max_num_seqs=7
    )[0]
    await client.generate(worker.address, draw(100), 5)
    description = await client.worker(worker.address).Describe(worker_pb2.DescribeRequest(), timeout=20)
    assert description.config["max_num_seqs"] == "7"
    assert description.namespace.model != ""
    assert description.cache_epoch == cache.announced["epoch"]
    assert redis.password not in str(description) + worker.logged()
    entries = [json.loads(line) for line in worker.logged().splitlines()]
    serving = next(entry for entry in entries if entry["message"] == "serving")
    assert serving["config"]["redis_url"].startswith("redis://:***@")
    metrics = await asyncio.to_thread(read_metrics, worker.announced["metrics"])
    assert 'stemcache_worker_tokens_total{origin="computed"} 100.0' in metrics
    assert 'stemcache_worker_tokens_total{origin="generated"} 5.0' in metrics
    assert "stemcache_worker_connected 1.0" in metrics


async def test_text_and_its_token_ids_are_one_prompt(client: Client, start: Starter, draw: Draw) -> None:

    cache = start.cache()
    worker = start.workers(cache.address)[0]
    tokenized = await client.worker(worker.address).Tokenize(worker_pb2.TokenizeRequest(text="grüße, 世界"), timeout=20)
    text = worker_pb2.GenerateRequest(text="grüße, 世界", sampling=worker_pb2.SamplingParams(ignore_eos=True))
    ids = worker_pb2.GenerateRequest(
        token_ids=worker_pb2.TokenIds(ids=tokenized.token_ids), sampling=worker_pb2.SamplingParams(ignore_eos=True)
    )
    stub = client.worker(worker.address)
    by_text = [response async for response in stub.Generate(text, timeout=30)]
    by_ids = [response async for response in stub.Generate(ids, timeout=30)]
    assert b"".join(r.token_ids for r in by_text) == b"".join(r.token_ids for r in by_ids)
    assert by_ids[-1].usage.prompt_tokens == len(tokenized.token_ids) // 4
