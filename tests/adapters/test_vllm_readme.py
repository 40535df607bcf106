"""The lines by which the README puts the host tier under vLLM name what exists; `make conformance-vllm` runs them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re

import pytest

from adapters.vllm.identity import check_config
from adapters.vllm.settings import Settings
from benchmarks.conformance.vllm import CASES, command, readme_config
from cache_service.config import CacheConfig
from tests.adapters.test_vllm_identity import config
from tests.architecture.sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("## Under vLLM") :].split("\n## ", 1)[0]


def test_they_are_few_and_stand_in_the_first_screen() -> None:
    lines = SECTION.split("```")[1].strip().splitlines()
    assert len(lines) < 10
    assert README[: README.index(lines[-1])].count("\n") < 45


def test_the_class_is_where_they_say() -> None:
    given = readme_config()
    path = ROOT / (given["kv_connector_module_path"].replace(".", "/") + ".py")
    classes = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert given["kv_connector"] in classes


def test_the_connector_takes_their_options() -> None:
    given = readme_config()
    assert Settings.read(given["kv_connector_extra_config"]) == Settings()
    check_config(config(kv_transfer__kv_load_failure_policy=given["kv_load_failure_policy"]))


def test_the_services_command_and_the_distribution_exist() -> None:
    flags = re.search(r"-m cache_service (.*?) &", SECTION)
    assert flags is not None
    names = re.findall(r"--([\w-]+)", flags[1])
    assert names and {name.replace("-", "_") for name in names} <= set(CacheConfig.__dataclass_fields__)
    assert Settings().cache == CacheConfig().listen
    folders = re.findall(r"pip install \./(\w+)", SECTION)
    assert folders and all((ROOT / folder / "pyproject.toml").is_file() for folder in folders)


def test_the_scenes_run_them() -> None:
    made = command("python", ROOT, CASES["states"])
    given = made[made.index("--kv-transfer-config") + 1]
    assert all(f'"{value}"' in given for value in readme_config().values() if isinstance(value, str))
    assert "{cache}" in given and "{redis}" in given


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_the_engine_has_what_the_connector_builds_on() -> None:
    found = getattr(
        importlib.import_module(readme_config()["kv_connector_module_path"]), readme_config()["kv_connector"]
    )
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    assert issubclass(found, base.KVConnectorBase_V1) and issubclass(found, base.SupportsHMA)
    assert not found.__abstractmethods__
    ours = {name for name, value in vars(found).items() if callable(value) and not name.startswith("_")}
    assert ours <= set(dir(base.KVConnectorBase_V1)) | set(dir(base.SupportsHMA)), "a method that vLLM does not call"
