"""The names of stored tensors: roots of multimodal folders, what is of no use, and what is wrong by its stored name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.worker_service.model_kit import CPU, MODELS, PAGE, SIZES, Bench, Part, make_reference, random_tokens
from worker_service.core.errors import ModelError
from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import expected_tensors
from worker_service.model.tensor_names import TensorNames
from worker_service.model.weight_formats import UNQUANTISED
from worker_service.model.weights import Checkpoint, CheckpointTensors, open_weights

# Both layouts of the same multimodal wrapper, and a folder of the decoder alone.
ROOTS = ("language_model.model.", "model.language_model.", "model.")
IGNORED = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.")
TOWER = {"vision_tower.blocks.0.weight": torch.ones(2, 2), "multi_modal_projector.bias": torch.ones(3)}
PROJECTION = "layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_reference("llama", tmp_path)
    return tmp_path


def rename(folder: Path, root: str, head: str, **more: torch.Tensor) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = {name: head if name == "lm_head.weight" else root + name.removeprefix("model.") for name in tensors}
    save_file({**{names[name]: tensor for name, tensor in tensors.items()}, **more}, folder / WEIGHTS)


def opened(folder: Path, names: TensorNames) -> CheckpointTensors:
    checkpoint = Checkpoint(folder, names, UNQUANTISED)
    total_bytes = checkpoint.check(expected_tensors(read_model_spec(folder)), False)
    return CheckpointTensors(checkpoint, total_bytes, torch.float32, CPU, lambda *_: None)


@pytest.mark.parametrize(
    ("root", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.", "lm_head.weight"),
    ],
)
def test_the_decoder_is_found_under_its_root(folder: Path, root: str, head: str) -> None:
    plain = load_file(folder / WEIGHTS)
    rename(folder, root, head, **TOWER)
    source = opened(folder, TensorNames(ROOTS, IGNORED))
    for name, (shape, _) in expected_tensors(read_model_spec(folder)).items():
        assert torch.equal(source.take(name, *shape), plain[name]), name


def test_what_is_neither_the_models_nor_ignored_is_named_as_stored(folder: Path) -> None:
    rename(folder, "language_model.model.", "lm_head.weight", **TOWER)
    with pytest.raises(ModelError, match="no place") as caught:
        opened(folder, TensorNames(ROOTS, IGNORED[:1]))
    assert caught.value.field == "multi_modal_projector.bias"
    with pytest.raises(ModelError, match="missing") as caught:
        opened(folder, TensorNames(("model.",), IGNORED))
    assert caught.value.field == "model.embed_tokens.weight"


def test_a_wrong_shape_is_named_as_stored(folder: Path) -> None:
    root = "model.language_model."
    rename(folder, root, "lm_head.weight", **{f"{root}{PROJECTION}": torch.ones(48, 47)})
    with pytest.raises(ModelError, match=r"\[48, 47\].*\[48, 48\]") as caught:
        opened(folder, TensorNames(ROOTS))
    assert caught.value.field == f"{root}{PROJECTION}"


def test_one_tensor_under_two_names_is_refused(folder: Path) -> None:
    rename(folder, "language_model.model.", "lm_head.weight", **{f"model.{PROJECTION}": torch.ones(48, 48)})
    with pytest.raises(ModelError, match=f"both are the model's model.{PROJECTION}"):
        opened(folder, TensorNames(ROOTS))


def test_a_multimodal_folder_gives_the_logits_of_its_text_model(tmp_path: Path) -> None:
    """As transformers writes it: the decoder's fields in text_config, a vision tower beside it."""
    text = {**SIZES, **MODELS["gemma3"][1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    reference = transformers.Gemma3ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    assert any(name.startswith("vision_tower.") for name in load_file(tmp_path / WEIGHTS))
    tokens = random_tokens(PAGE, 1)
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens])).logits[0]
    bench = Bench(tmp_path)
    made = bench.all_logits(Part(bench.sequence(tokens, [1, 2]), 0, PAGE))
    assert (made - wanted).abs().max().item() <= 1e-5 * max(1.0, wanted.abs().max().item())


QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": SIZES["hidden_size"],
    "patch_size": 4,
}


@pytest.mark.parametrize(("family", "model"), [("Qwen3_5", "qwen3.5"), ("Qwen3_5Moe", "qwen3.5-moe")])
def test_a_folder_as_qwen_publishes_it(tmp_path: Path, family: str, model: str) -> None:
    """A vision tower, layers that predict ahead, and all experts of a layer in one tensor; transformers writes each
    expert's own."""
    text = {**SIZES, **MODELS[model][1], "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=QWEN_TOWER)
    torch.manual_seed(3)
    reference = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(70, 1)
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens])).logits[0]
    stored = load_file(tmp_path / WEIGHTS)
    assert any(name.startswith("model.visual.") for name in stored)
    for spelling in (stored, {**with_joined_experts(stored), "mtp.layers.0.input_layernorm.weight": torch.ones(48)}):
        save_file(spelling, tmp_path / WEIGHTS)
        bench = Bench(tmp_path)
        made = bench.all_logits(Part(bench.sequence(tokens, [1, 2]), 0, len(tokens)))
        assert (made - wanted).abs().max().item() <= 1e-5 * max(1.0, wanted.abs().max().item())
    assert any(name.endswith(".experts.gate_up_proj") for name in spelling) == (model == "qwen3.5-moe")


def test_a_folder_as_moonshot_publishes_it(tmp_path: Path) -> None:
    """The dense layer's MLP is called mlp; transformers saves it under the name of the experts."""
    make_reference("kimi-linear", tmp_path)
    saved, tokens, logits = load_file(tmp_path / WEIGHTS), random_tokens(70, 1), []
    prefixes = ("model.layers.0.block_sparse_moe.", "model.layers.0.mlp.")
    published = {name.replace(*prefixes): tensor for name, tensor in saved.items()}
    assert saved.keys() - published.keys() and {f"{prefixes[1]}gate_proj.weight"} <= published.keys()
    for spelling in (saved, published):
        save_file(spelling, tmp_path / WEIGHTS)
        bench = Bench(tmp_path)
        logits.append(bench.all_logits(Part(bench.sequence(tokens, [1, 2]), 0, len(tokens))))
    assert torch.equal(*logits)


def with_joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns them with one tensor for all experts of a layer: gates over ups, and downs."""
    joined = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] + ".experts" for name in tensors.keys() - joined.keys()}):
        count = sum(name.startswith(prefix) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        joined |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    return joined


def test_half_of_the_joined_experts_is_named(tmp_path: Path) -> None:
    make_reference("qwen3.5-moe", tmp_path)
    joined = with_joined_experts(load_file(tmp_path / WEIGHTS))
    (name, *_) = (name for name in joined if name.endswith("layers.2.mlp.experts.down_proj"))
    del joined[name]
    save_file(joined, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match="missing") as caught:
        open_weights(tmp_path, read_model_spec(tmp_path), torch.float32, CPU)
    assert caught.value.field == "model.layers.2.mlp.experts.down_proj"


@pytest.mark.parametrize(("model", "ignored"), [("glm4-moe", True), ("qwen3-moe", False)])
def test_layers_that_predict_ahead_are_skipped_where_a_family_has_them(
    tmp_path: Path, model: str, ignored: bool
) -> None:
    make_reference(model, tmp_path)
    spec = read_model_spec(tmp_path)
    name = f"model.layers.{len(spec.layers)}.eh_proj.weight"
    save_file({**load_file(tmp_path / WEIGHTS), name: torch.ones(48, 96)}, tmp_path / WEIGHTS)
    if ignored:
        norm = open_weights(tmp_path, spec, torch.float32, CPU).take("model.norm.weight", 48)
        assert torch.equal(norm, load_file(tmp_path / WEIGHTS)["model.norm.weight"])
        return
    with pytest.raises(ModelError, match="no place") as caught:
        open_weights(tmp_path, spec, torch.float32, CPU)
    assert caught.value.field == name


def test_a_layer_further_back_is_no_layer_that_predicts_ahead(tmp_path: Path) -> None:
    make_reference("glm4-moe", tmp_path)
    stray = "model.layers.30.eh_proj.weight"
    save_file({**load_file(tmp_path / WEIGHTS), stray: torch.ones(48, 96)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match="no place") as caught:
        open_weights(tmp_path, read_model_spec(tmp_path), torch.float32, CPU)
    assert caught.value.field == stray


@pytest.mark.parametrize(("num_mtp_layers", "first_unknown"), [(0, 3), (1, 4), (2, 5)])
def test_a_config_says_how_many_layers_predict_ahead(tmp_path: Path, num_mtp_layers: int, first_unknown: int) -> None:
    """A config that says one layer too few is told: the last layer is then behind those that predict ahead."""
    make_reference("glm4-moe", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": num_mtp_layers}))
    spec = read_model_spec(tmp_path)
    assert len(spec.layers) == 3
    ahead = {f"model.layers.{layer}.eh_proj.weight": torch.ones(48, 96) for layer in range(3, first_unknown)}
    plain = load_file(tmp_path / WEIGHTS)
    save_file({**plain, **ahead}, tmp_path / WEIGHTS)
    open_weights(tmp_path, spec, torch.float32, CPU)
    unknown = f"model.layers.{first_unknown}.eh_proj.weight"
    save_file({**plain, **ahead, unknown: torch.ones(48, 96)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match="no place") as caught:
        open_weights(tmp_path, spec, torch.float32, CPU)
    assert caught.value.field == unknown
