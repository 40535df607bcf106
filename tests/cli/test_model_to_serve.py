"""Which folder a command serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.model_to_serve import model_name, model_to_serve
from cli.output import Output
from cli.run_file import STATE_DIR_VARIABLE
from register_qa import HYBRID_FOLDER, MODEL_FOLDER

OUTPUT = Output(as_json=True)


def test_the_model_in_the_box_is_served_unless_another_is_named(tmp_path: Path) -> None:
    assert model_to_serve("", 0, OUTPUT) == str(MODEL_FOLDER)
    assert model_to_serve("hybrid", 0, OUTPUT) == str(HYBRID_FOLDER)
    assert model_to_serve(str(tmp_path), 0, OUTPUT) == str(tmp_path)
    assert model_to_serve("some/hub-id", 0, OUTPUT) == "some/hub-id"
    assert (model_name(""), model_name("random")) == ("the one in the box", "random")


def test_random_weights_are_made_once_for_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path))
    first = Path(model_to_serve("random", 1, OUTPUT))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert Path(model_to_serve("random", 1, OUTPUT)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert Path(model_to_serve("random", 2, OUTPUT)) != first
    assert len(list(first.parent.iterdir())) == 2, "nothing half-made is left"
