"""`stemcache models` lists the registry of families, for people and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import preflight
from cli.__main__ import app
from tests.cli.command import ask, stemcache
from worker_service.model.families import BY_ARCHITECTURE


def test_every_architecture_is_listed_with_what_it_needs(tmp_path: Path) -> None:
    models = {model.pop("architecture"): model for model in ask(tmp_path, "models")["models"]}
    assert list(models) == list(BY_ARCHITECTURE)
    assert models["LlamaForCausalLM"] == {"kinds": ["full"], "weight_formats": ["plain", "fp8"], "page_tokens": 16}
    assert models["GptOssForCausalLM"] == {
        "kinds": ["full", "window"],
        "weight_formats": ["plain", "mxfp4"],
        "page_tokens": 16,
    }


def test_the_table_has_a_row_for_each(tmp_path: Path) -> None:
    done = stemcache(tmp_path, "models")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["architecture", "groups", "weights", "page", "tokens"] in rows
    assert ["MistralForCausalLM", "full,", "window", "plain,", "fp8", "16"] in rows
    assert set(BY_ARCHITECTURE) <= {row[0] for row in rows if row}


def test_where_no_worker_is_installed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the cache service's image."""
    monkeypatch.setattr(preflight, "_is_missing", lambda name: name == "torch")
    done = CliRunner().invoke(app, ["models"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "torch not installed" in done.stderr
