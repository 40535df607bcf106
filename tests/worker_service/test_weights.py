"""Model folders: one file or shards, what is wrong with them by name, and a digest of what they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_service.model_kit import CPU
from worker_service.model.config import ModelError, read_model_config
from worker_service.model.demo_model import make_demo_model
from worker_service.model.load import LoadedModel, load_model
from worker_service.model.weights import INDEX, WEIGHTS, load_weights, model_digest, resolve_folder

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_demo_model(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path) -> LoadedModel:
    return load_model(str(folder), CPU)


def shard(folder: Path) -> dict[str, str]:
    """Rewrite the weights as two shards and an index; returns the index's map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def change_weights(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_shards_hold_the_same_model(folder: Path) -> None:
    config = read_model_config(folder)
    whole = load_weights(folder, config, torch.float32, CPU)
    shard(folder)
    parts = load_weights(folder, config, torch.float32, CPU)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_tied_and_derived_tensors_may_be_stored(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(32)}))
    assert load(folder).config.tied_embeddings


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("model.norm.weight", lambda t: t.pop("model.norm.weight"), "missing"),
        ("lm_head.weight", lambda t: t.pop("lm_head.weight"), "missing"),
        ("model.extra.weight", lambda t: t.update({"model.extra.weight": torch.ones(3)}), "no place"),
        (
            "model.layers.2.self_attn.q_proj.bias",
            lambda t: t.update({"model.layers.2.self_attn.q_proj.bias": torch.ones(128)}),
            "no place",
        ),
        (
            "model.layers.1.mlp.up_proj.weight",
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(256, 127)}),
            r"\[256, 127\].*\[256, 128\]",
        ),
    ],
)
def test_wrong_tensors_are_named(folder: Path, name: str, change: Callable[[Tensors], None], reason: str) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError, match=reason) as caught:
        load(folder)
    assert caught.value.field == name


def test_missing_and_broken_weight_files_are_named(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
    with pytest.raises(ModelError, match="safetensors") as caught:
        load(folder)
    assert caught.value.field == WEIGHTS
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=INDEX):
        load(folder)


@pytest.mark.parametrize("file", ["gone.safetensors", "../model.safetensors", 7])
def test_index_may_only_name_files_of_the_folder(folder: Path, file: object) -> None:
    weight_map = shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "lm_head.weight": file}}))
    with pytest.raises(ModelError, match=r"model folder|file name"):
        load(folder)


def test_index_that_lies_is_told(folder: Path) -> None:
    weight_map = shard(folder)
    other = next(file for file in weight_map.values() if file != weight_map["lm_head.weight"])
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "lm_head.weight": other}}))
    with pytest.raises(ModelError, match="index says so") as caught:
        load(folder)
    assert caught.value.field == "lm_head.weight"


def test_missing_or_foreign_tokenizer_is_told(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    change_weights(folder, lambda tensors: tensors.update({n: tensors[n][:100] for n in ("lm_head.weight",)}))
    change_weights(folder, lambda t: t.update({n: t[n][:100] for n in ("model.embed_tokens.weight",)}))
    (folder / "config.json").write_text(json.dumps({**fields, "vocab_size": 100}))
    with pytest.raises(ModelError, match=r"260 tokens.*100"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json: is not in"):
        load(folder)


def test_max_model_len_can_only_shrink(folder: Path) -> None:
    assert load_model(str(folder), CPU, max_model_len=100).config.max_model_len == 100
    with pytest.raises(ModelError, match="max_model_len"):
        load_model(str(folder), CPU, max_model_len=16385)


def test_digest_is_of_the_content_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    digest = model_digest(folder)
    assert len(digest) == 32
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    fields = json.loads((folder / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**dict(reversed(fields.items())), "_name_or_path": "somewhere"}))
    assert model_digest(moved) == digest


@pytest.mark.parametrize("part", ["config", "tokenizer", "weights"])
def test_digest_changes_with_every_part(folder: Path, part: str) -> None:
    digest = model_digest(folder)
    if part == "config":
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "rms_norm_eps": 1e-6}))
    elif part == "tokenizer":
        with (folder / "tokenizer.json").open("a") as file:
            file.write(" ")
    else:
        change_weights(folder, lambda tensors: tensors["lm_head.weight"][3, 4].add_(1e-3))
    assert model_digest(folder) != digest


def test_neither_folder_nor_hub_id() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a hub id") as caught:
        resolve_folder("/no/such/folder/anywhere")
    assert caught.value.field == "model"
