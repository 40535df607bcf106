"""What `pip install ./adapters` puts into an engine's environment: all that the connectors import, and nothing more."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.sources import ROOT

# `kernels` above all: transformers and SGLang import Hugging Face's package of that name.
PACKAGES = {"adapters", "protos", "session", "tier_client"}
# Of the connectors what imports no engine.
MODULES = (
    "tier_client.client",
    "session.messages",
    "protos.v1.host_tier_pb2_grpc",
    "adapters.given_settings",
    "adapters.vllm.settings",
    "adapters.sglang.settings",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from copies, as a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("client")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--wheel-dir"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, folder, folder / "adapters"], check=True, timeout=120
    )
    (built,) = folder.glob("*.whl")
    return built


def test_it_brings_no_package_of_the_services(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [Path(name) for name in archive.namelist()]
    assert {path.parts[0] for path in files if not path.parts[0].endswith(".dist-info")} == PACKAGES


def test_it_has_every_module_of_its_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {path for path in sources if "/build/" not in path} <= files


def test_its_modules_are_imported_from_it_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + "\n".join(f"import {name}" for name in MODULES)
    code += f"\nassert all(sys.modules[name].__file__.startswith({str(tmp_path)!r}) for name in {MODULES!r})"
    code += "\nassert 'torch' not in sys.modules and 'kernels' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60)


def test_it_asks_for_what_the_services_do() -> None:
    services, client = (project(path) for path in (ROOT / "pyproject.toml", ROOT / "adapters" / "pyproject.toml"))
    assert client["version"] == services["version"] and client["requires-python"] == services["requires-python"]
    asked = [*services["dependencies"], *services["optional-dependencies"]["worker"]]
    assert set(client["dependencies"]) <= set(asked)


def project(path: Path) -> dict[str, Any]:
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["project"])
