"""Quantised checkpoints, in the names and dtypes in which they are published, against transformers' own reading."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker_service.model_kit import CPU, MODELS, PAGE, Bench, Part, make_reference, random_tokens
from worker_service.core.errors import ModelError
from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.tensor_names import TensorNames
from worker_service.model.tensors import Expected
from worker_service.model.weight_formats import Fp8Blocks, Mxfp4, WeightFormat
from worker_service.model.weights import Checkpoint, CheckpointTensors

BLOCK = 128
FP8 = Fp8Blocks(BLOCK, BLOCK)
# As in the config.json of DeepSeek V3.
FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
FP8_PROJECTIONS = (
    *("_proj.weight", "in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight"),
    *("indexer.wq_b.weight", "indexer.wk.weight"),
)
# An indexer's weights of heads stay as they are.
FP8_PLAIN = "weights_proj.weight"
MTP_LAYER = "model.layers.3"
EXPERTS = "model.layers.0.mlp.experts"


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight as e4m3, and the factor of each block."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for row, column in product(range(scales.shape[0]), range(scales.shape[1])):
        block = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
        scales[row, column] = weight[block].abs().max() / 448
        codes[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def one_by_one(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = codes.float()
    for row, column in product(range(codes.shape[0]), range(codes.shape[1])):
        values[row, column] *= scales[row // BLOCK, column // BLOCK]
    return values


@pytest.mark.parametrize("shape", [(128, 256), (5, 3), (130, 40), (40, 300), (257, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_blocks_may_be_cut_short_at_the_edges(shape: tuple[int, int], dtype: torch.dtype) -> None:
    codes, scales = quantised(torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])))
    assert torch.equal(FP8.decoded([codes, scales], dtype), one_by_one(codes, scales).to(dtype))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_read_as_transformers_does(scale_dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = quantised(torch.randn(3 * BLOCK, 2 * BLOCK, generator=torch.Generator().manual_seed(1)))
    scales = scales.to(scale_dtype)
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(FP8.decoded([codes, scales], torch.bfloat16), wanted)


def store_as_fp8(folder: Path) -> None:
    """Rewrite a folder as DeepSeek's and Qwen's are: projections as e4m3, all else as it was."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        if name.endswith(FP8_PROJECTIONS) and not name.endswith(FP8_PLAIN):
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(weight)
        else:
            tensors[name] = weight
    save_file(tensors, folder / WEIGHTS)
    change_config(folder, quantization_config={**FP8_CONFIG, "modules_to_not_convert": ["lm_head"]})


def store_as_read(folder: Path) -> None:
    """Write what an fp8 folder stands for as a plain one."""
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = one_by_one(tensors[weight], tensors.pop(name))
    save_file(tensors, folder / WEIGHTS)
    change_config(folder, quantization_config=None)


def change_config(folder: Path, **changes: object) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def logits(folder: Path) -> torch.Tensor:
    bench = Bench(folder)
    return bench.all_logits(Part(bench.sequence(random_tokens(PAGE, 1), [1, 2]), 0, PAGE))


@pytest.fixture
def fp8_folder(tmp_path: Path) -> Path:
    """Experts, and a layer that predicts ahead behind the last one."""
    make_reference("glm4-moe", tmp_path)
    store_as_fp8(tmp_path)
    return tmp_path


def test_an_fp8_folder_is_the_model_that_its_values_are(fp8_folder: Path) -> None:
    ahead = {f"{MTP_LAYER}.eh_proj.weight": torch.ones(48, 96), f"{MTP_LAYER}.enorm.weight": torch.ones(48)}
    change_weights(fp8_folder, **ahead)
    quick = logits(fp8_folder)
    store_as_read(fp8_folder)
    assert torch.equal(quick, logits(fp8_folder))


def test_an_indexer_in_fp8_blocks(tmp_path: Path) -> None:
    """By DeepSeek's names, scales as powers of two among them, and a layer ahead with an indexer of its own."""
    make_reference("deepseek-v32", tmp_path)
    store_as_fp8(tmp_path)
    change_config(tmp_path, quantization_config={**FP8_CONFIG, "scale_fmt": "ue8m0"})
    indexer = "model.layers.0.self_attn.indexer"
    names = {name.removeprefix(f"{indexer}.") for name in load_file(tmp_path / WEIGHTS) if name.startswith(indexer)}
    matrices = {"wq_b.weight", "wq_b.weight_scale_inv", "wk.weight", "wk.weight_scale_inv"}
    assert names == {*matrices, "k_norm.weight", "k_norm.bias", "weights_proj.weight"}
    change_weights(tmp_path, **{f"{MTP_LAYER}.self_attn.indexer.wk.weight": torch.ones(16, 48)})
    quick = logits(tmp_path)
    store_as_read(tmp_path)
    assert torch.equal(quick, logits(tmp_path))


@pytest.mark.parametrize("model", ["qwen3-next", "qwen3.5-moe"])
def test_projections_of_several_parts_may_be_stored_as_fp8(tmp_path: Path, model: str) -> None:
    """Blocks of rows are not the parts: those are told apart behind the decoding."""
    make_reference(model, tmp_path)
    store_as_fp8(tmp_path)
    assert any("linear_attn.in_proj" in name for name in load_file(tmp_path / WEIGHTS) if name.endswith("_scale_inv"))
    quick = logits(tmp_path)
    store_as_read(tmp_path)
    assert torch.equal(quick, logits(tmp_path))


@pytest.mark.parametrize(
    ("part", "stored", "reason"),
    [
        ("_scale_inv", torch.ones(2, 1), r"shape \[2, 1\].*\[1, 1\]"),
        ("_scale_inv", torch.ones(1, 1, dtype=torch.int16), "dtype I16.* or BF16"),
        ("", torch.ones(24, 48, dtype=torch.bfloat16), "dtype BF16.*F8_E4M3"),
        ("", None, "missing"),
    ],
)
def test_a_wrong_part_of_an_fp8_weight_is_named(
    fp8_folder: Path, part: str, stored: torch.Tensor | None, reason: str
) -> None:
    name = f"model.layers.1.mlp.experts.2.up_proj.weight{part}"
    change_weights(fp8_folder, **{name: stored})
    with pytest.raises(ModelError, match=reason) as caught:
        logits(fp8_folder)
    assert caught.value.field == name


def test_an_fp8_weight_without_scales_is_told(fp8_folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(fp8_folder, **{f"{name}_scale_inv": None})
    with pytest.raises(ModelError, match="dtype F8_E4M3") as caught:
        logits(fp8_folder)
    assert caught.value.field == name


def test_scales_of_a_plain_config_are_told(fp8_folder: Path) -> None:
    change_config(fp8_folder, quantization_config=None)
    with pytest.raises(ModelError, match="no place") as caught:
        logits(fp8_folder)
    assert caught.value.field.endswith("_scale_inv")


def mxfp4_experts(seed: int, *shape: int) -> dict[str, torch.Tensor]:
    """Random blocks, and scales that reach from the least to the largest that bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(0, 252, shape, generator=generator, dtype=torch.uint8)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return {f"{EXPERTS}.gate_up_proj_blocks": blocks, f"{EXPERTS}.gate_up_proj_scales": scales}


def opened(folder: Path, weight_format: WeightFormat, **shapes: tuple[int, ...]) -> CheckpointTensors:
    checkpoint = Checkpoint(folder, TensorNames(), weight_format)
    wanted = {f"{EXPERTS}.{name}": Expected(shape) for name, shape in shapes.items()}
    return CheckpointTensors(checkpoint, checkpoint.check(wanted, False), torch.bfloat16, CPU, lambda *_: None)


def test_mxfp4_experts_are_read_as_transformers_does(tmp_path: Path) -> None:
    """By the names of gpt-oss, beside biases, which are plain."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, rows, columns = 3, 10, 64
    stored = mxfp4_experts(1, experts, rows, columns // 32)
    bias = torch.randn(experts, rows).bfloat16()
    save_file({**stored, f"{EXPERTS}.gate_up_proj_bias": bias}, tmp_path / WEIGHTS)
    source = opened(tmp_path, Mxfp4(), gate_up_proj=(experts, columns, rows), gate_up_proj_bias=(experts, rows))
    made = source.take(f"{EXPERTS}.gate_up_proj", experts, columns, rows)
    assert made.shape == (experts, columns, rows)
    assert made.transpose(1, 2).is_contiguous()
    assert torch.equal(made, convert_moe_packed_tensors(*stored.values(), dtype=torch.bfloat16))
    assert torch.equal(source.take(f"{EXPERTS}.gate_up_proj_bias", experts, rows), bias)


def test_a_gpt_oss_folder_in_mxfp4_gives_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of whole blocks; the reference gets the values that transformers reads from the same blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    family, fields = MODELS["gpt-oss"]
    sizes = {**fields, "hidden_size": 64, "intermediate_size": 32}
    monkeypatch.setitem(MODELS, "gpt-oss-mxfp4", (family, sizes))
    reference = make_reference("gpt-oss-mxfp4", tmp_path)
    changes: dict[str, torch.Tensor | None] = {}
    for number, (name, weight) in enumerate(reference.named_parameters()):
        if name.endswith((".gate_up_proj", ".down_proj")):
            experts, columns, rows = weight.shape
            blocks, scales = mxfp4_experts(number, experts, rows, columns // 32).values()
            scales = 120 + scales % 4
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            changes |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
    change_weights(tmp_path, **changes)
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    change_config(tmp_path, quantization_config=quantisation)
    with torch.no_grad():
        wanted = reference(torch.tensor([random_tokens(PAGE, 1)])).logits[0]
    assert (logits(tmp_path) - wanted).abs().max().item() <= 1e-5 * max(1.0, wanted.abs().max().item())


def test_mxfp4_values_are_those_of_the_standard() -> None:
    """One block of all sixteen codes twice, low halves first, times 2 to the scale - 127."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = [*positive, *(-value for value in positive)]
    in_order = torch.tensor([low | low + 1 << 4 for low in range(0, 16, 2)] * 2, dtype=torch.uint8)
    scales = torch.tensor([126, 127, 130], dtype=torch.uint8).view(1, 3, 1)
    made = Mxfp4().decoded([in_order.expand(1, 3, 1, 16).contiguous(), scales], torch.float32)
    for row, factor in enumerate((0.5, 1.0, 8.0)):
        assert made[0, :, row].tolist() == [value * factor for value in values * 2]


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"_scales": None}, "_scales", "missing"),
        ({"_scales": torch.ones(3, 10, 3, dtype=torch.uint8)}, "_scales", r"\[3, 10, 3\].*\[3, 10, 2\]"),
        ({"_blocks": torch.ones(3, 10, 2, 16).bfloat16()}, "_blocks", "dtype BF16.*U8"),
        ({"": torch.ones(3, 64, 10)}, "", "no place"),
    ],
)
def test_a_wrong_part_of_mxfp4_experts_is_named(
    tmp_path: Path, changes: dict[str, Any], field: str, reason: str
) -> None:
    name = f"{EXPERTS}.gate_up_proj"
    save_file(mxfp4_experts(1, 3, 10, 2), tmp_path / WEIGHTS)
    change_weights(tmp_path, **{f"{name}{part}": tensor for part, tensor in changes.items()})
    with pytest.raises(ModelError, match=reason) as caught:
        opened(tmp_path, Mxfp4(), gate_up_proj=(3, 64, 10))
    assert caught.value.field == f"{name}{field}"


def test_mxfp4_needs_whole_blocks(tmp_path: Path) -> None:
    save_file(mxfp4_experts(1, 3, 10, 2), tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"rows of 63 must divide by 32"):
        opened(tmp_path, Mxfp4(), gate_up_proj=(3, 63, 10))
