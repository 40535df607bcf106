"""A model by its hub id: downloaded by the real client from a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cli.random_model import make_random_model
from tests import fork_server
from tests.worker_service.test_weights import shard

MODEL = "stemcache/demo"
COMMIT = "0" * 39 + "1"


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's interface that a download uses: lists of the files, and each file."""

    def __init__(self, folder: Path, requested: list[str], *arguments: object) -> None:
        self._folder = folder
        self._requested = requested
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.removeprefix(f"/{MODEL}/resolve/").partition("/")[2]
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            body = json.dumps([self._entry(name) for name in self._names()]).encode()
        elif path.startswith(f"/api/models/{MODEL}"):
            files = [{"rfilename": name} for name in self._names()]
            body = json.dumps({"id": MODEL, "sha": COMMIT, "private": False, "siblings": files}).encode()
        elif path.startswith(f"/{MODEL}/resolve/") and (self._folder / name).is_file():
            self._requested.append(name)
            body = (self._folder / name).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _names(self) -> list[str]:
        return sorted(str(file.relative_to(self._folder)) for file in self._folder.rglob("*") if file.is_file())

    def _entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": (self._folder / name).stat().st_size, "oid": "0" * 40}

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_random_model(folder, seed=2)
    (folder / "training.bin").write_bytes(b"nobody wants this")
    return folder


@pytest.fixture
def requested() -> list[str]:
    return []


@pytest.fixture
def hub(folder: Path, requested: list[str]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, requested))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def load(model: str, hub: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads where the hub is when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    environment.update(more)
    return fork_server.run("tests.worker_service.loaded_model", model, environment=environment, timeout=120)


def test_a_hub_id_is_downloaded_once_and_is_the_same_model(
    folder: Path, hub: str, requested: list[str], tmp_path: Path
) -> None:
    by_folder, by_id = (load(str(model), hub, tmp_path / "cache") for model in (folder, MODEL))
    assert by_id.returncode == 0, by_id.stderr
    assert by_id.stdout == by_folder.stdout
    assert set(requested) == {"config.json", "tokenizer.json", "model.safetensors"}
    requested.clear()
    again = load(MODEL, hub, tmp_path / "cache")
    assert again.stdout == by_folder.stdout
    assert "model.safetensors" not in requested


def test_the_index_says_which_weights_are_downloaded(
    folder: Path, hub: str, requested: list[str], tmp_path: Path
) -> None:
    """As large models are kept: shards, the whole once more for another program, and its original."""
    weights = folder / "model.safetensors"
    (folder / "original").mkdir()
    for copy in ("consolidated.safetensors", "original/model.safetensors", "original/tokenizer.json"):
        shutil.copy(weights, folder / copy)
    shards = set(shard(folder).values())
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    by_id = load(MODEL, hub, tmp_path / "cache")
    assert by_id.returncode == 0, by_id.stderr
    small = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(requested) == {*small, "model.safetensors.index.json", *shards}
    offline = load(MODEL, hub, tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert offline.stdout == by_id.stdout, offline.stderr


def test_an_unknown_hub_id_is_told(hub: str, tmp_path: Path) -> None:
    failed = load("stemcache/nothing", hub, tmp_path / "cache")
    assert failed.returncode != 0
    assert "neither a folder nor a hub id" in failed.stderr
