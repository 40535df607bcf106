"""Images and the compose file: no torch where none belongs, nobody is root, profiles keep apart."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from itertools import chain

import pytest

from tests.architecture.sources import ROOT

HEAVY = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "huggingface")


def test_the_base_installation_holds_no_tensor_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if line.startswith(HEAVY)]


def test_the_cache_image_holds_the_cache_service_only() -> None:
    lines = (ROOT / "Dockerfile.cache").read_text().splitlines()
    copied = {line.split()[1] for line in lines if line.startswith("COPY ")}
    assert {"cache_service", "rpc", "protos"} <= copied
    assert not copied & {"worker_service", "kernels", "cli", "."}
    assert not any("[worker]" in line for line in lines)


def test_the_worker_image_holds_the_model_that_the_compose_file_names() -> None:
    dockerfile = (ROOT / "Dockerfile.worker").read_text()
    assert "COPY register_qa register_qa" in dockerfile
    assert "!register_qa" in (ROOT / ".dockerignore").read_text().splitlines()
    assert "/models/boxed" in dockerfile
    assert "STEMCACHE_WORKER_MODEL: ${STEMCACHE_MODEL:-/models/boxed}" in (ROOT / "docker-compose.yml").read_text()


@pytest.mark.parametrize("name", ["Dockerfile.cache", "Dockerfile.worker"])
def test_images_run_as_an_ordinary_user(name: str) -> None:
    users = [line.split()[1] for line in (ROOT / name).read_text().splitlines() if line.startswith("USER ")]
    assert users
    assert users[-1].partition(":")[0] not in ("root", "0")


def test_every_dependency_has_an_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    names = {line.split(";")[0].strip().rstrip("0123456789.,<>=! ") for line in wanted}
    assert not names - pinned - {"types-grpcio"}, names - pinned


@pytest.fixture
def services() -> dict[str, set[str]]:
    """What starts under each profile, as docker compose reads the file."""
    if shutil.which("docker") is None:
        pytest.skip("no docker")
    probe = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("no docker compose")
    return {profile: _services(profile) for profile in ("", "gpu", "cpu,observability")}


def _services(profile: str) -> set[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COMPOSE_PROFILES"}
    if profile:
        environment["COMPOSE_PROFILES"] = profile
    result = subprocess.run(
        ["docker", "compose", "config", "--services"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.split())


def test_profiles(services: dict[str, set[str]]) -> None:
    assert services[""] == {"redis", "cache", "worker-1", "worker-2"}
    assert services["gpu"] == {"redis", "cache", "worker-gpu"}
    assert services["cpu,observability"] == services[""] | {"prometheus"}


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
