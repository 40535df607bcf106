"""Model folders: one file or shards, what is wrong with them by name, and a digest of what they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.random_model import make_random_model
from tests.worker_service.model_kit import CPU
from worker_service.core.errors import ModelError
from worker_service.model import digest as digest_module
from worker_service.model.checkpoint_files import INDEX, WEIGHTS
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import expected_shapes
from worker_service.model.digest import model_digest
from worker_service.model.hub import resolve_folder
from worker_service.model.load import LoadedModel, load_model
from worker_service.model.weights import open_weights

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_random_model(tmp_path / "model")
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
    config = read_model_spec(folder)
    whole = open_weights(folder, config, torch.float32, CPU)
    (folder / "parts").mkdir()
    shutil.copy(folder / WEIGHTS, folder / "parts")
    shard(folder / "parts")
    parts = open_weights(folder / "parts", config, torch.float32, CPU)
    for name, shape in expected_shapes(config).items():
        assert torch.equal(whole.take(name, *shape), parts.take(name, *shape)), name


def test_tied_and_derived_tensors_may_be_stored(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(32)}))
    assert load(folder).spec.tied_embeddings


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("model.norm.weight", lambda t: t.pop("model.norm.weight"), "missing.*the name is the worker's"),
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
    assert load_model(str(folder), CPU, max_model_len=100).spec.max_model_len == 100
    with pytest.raises(ModelError, match=r"max_model_len: 16385 is beyond.*rope_type yarn, factor and original"):
        load_model(str(folder), CPU, max_model_len=16385)


def test_a_yarn_factor_lets_it_grow(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16384}
    (folder / "config.json").write_text(json.dumps({**fields, "rope_parameters": rope}))
    assert load(folder).spec.max_model_len == 32768
    assert load_model(str(folder), CPU, max_model_len=20000).spec.max_model_len == 20000
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps({**fields, "rope_parameters": dynamic}))
    with pytest.raises(ModelError, match="dynamic is served up to max_position_embeddings only"):
        load_model(str(folder), CPU, max_model_len=20000)


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


def test_digest_is_a_tree_over_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built again from its definition, with pieces so small that every file has several, the last one short."""
    monkeypatch.setattr(digest_module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(digest_module, "READ_BYTES", 1024)
    shard(folder)
    fields = json.loads((folder / "config.json").read_text())
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    files = [folder / "tokenizer.json", *sorted(folder.glob("*.safetensors"))]
    whole = sha256(b"stemcache model 2" + sha256(canonical).digest() + len(files).to_bytes(4, "little"))
    for file in files:
        data = file.read_bytes()
        pieces = [sha256(data[at : at + 4096]).digest() for at in range(0, len(data), 4096)]
        assert len(pieces) > 1 and len(data) % 4096
        whole.update(sha256(len(data).to_bytes(8, "little") + b"".join(pieces)).digest())
    assert model_digest(folder) == whole.digest()


def test_digest_is_made_while_the_weights_are_loaded(folder: Path) -> None:
    assert load(folder).digest == model_digest(folder)


def test_progress_counts_stored_bytes(folder: Path) -> None:
    shard(folder)
    heard: list[tuple[int, int]] = []
    config = read_model_spec(folder)
    tensors = open_weights(folder, config, torch.bfloat16, CPU, lambda *counts: heard.append(counts))
    assert not heard, "nothing is read before it is taken"
    sizes = [4 * tensors.take(name, *shape).numel() for name, shape in expected_shapes(config).items()]
    assert heard == [(loaded, sum(sizes)) for loaded in accumulate(sizes)]


@pytest.mark.parametrize(
    ("eos_token", "wanted"),
    [("<|end|>", (257,)), ({"content": "<|end|>", "lstrip": False}, (257,)), ("<|nothing|>", ()), (None, ())],
)
def test_the_tokenizers_end_is_the_last_to_be_asked(folder: Path, eos_token: object, wanted: tuple[int, ...]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert load(folder).spec.eos_token_ids == (257,)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "eos_token_id": None}))
    assert load(folder).spec.eos_token_ids == wanted
    (folder / "tokenizer_config.json").unlink()
    assert load(folder).spec.eos_token_ids == ()


def test_neither_folder_nor_hub_id() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a hub id") as caught:
        resolve_folder("/no/such/folder/anywhere")
    assert caught.value.field == "model"
