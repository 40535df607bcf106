"""DeepSeek V4's weights as they are published: names, e4m3 blocks and packed e2m1 experts, both with e8m0 scales.

The names and formats are those that public loaders of the checkpoint state: transformers' conversion of `deepseek_v4`
and its FP8 reader, vLLM's `deepseek_v4.py`, and inventories of DeepSeek-V4-Flash's index. No file of it was read here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kernels.grouped_linear import Mxfp4Experts, dequantised
from tests.worker_service.cuda_device import NEEDS_CUDA, prepared_cuda
from tests.worker_service.model_kit import CPU, MODELS, VOCAB, Bench, Part, make_reference, random_tokens
from tests.worker_service.test_weight_formats import BLOCK, FP8_CONFIG, change_config, change_weights
from worker_service.core.errors import ModelError
from worker_service.model.checkpoint_files import WEIGHTS
from worker_service.model.config import read_model_spec
from worker_service.model.decoder import expected_tensors
from worker_service.model.weights import CheckpointTensors, open_weights

PAGE = 128
LENGTH = 2 * PAGE + 30
# Rows of 160 need two blocks of 128, the second cut short; experts need rows of whole blocks of 32.
SIZES = {"hidden_size": 160, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 4}
LAYER_TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
ATTENTION = {
    *(f"attn.{name}.{part}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b") for part in ("weight", "scale")),
    *("attn.q_norm.weight", "attn.kv_norm.weight", "attn.attn_sink"),
}
COMPRESSOR = {"wkv.weight", "wgate.weight", "norm.weight", "ape"}
INDEXER = {"wq_b.weight", "wq_b.scale", "weights_proj.weight", *(f"compressor.{name}" for name in COMPRESSOR)}
BLOCKS = {
    *(f"hc_{branch}_{part}" for branch in ("attn", "ffn") for part in ("fn", "base", "scale")),
    *("attn_norm.weight", "ffn_norm.weight", "ffn.gate.weight"),
    *(f"ffn.shared_experts.{name}.{part}" for name in ("w1", "w2", "w3") for part in ("weight", "scale")),
    *(
        f"ffn.experts.{at}.{name}.{part}"
        for at in range(6)
        for name in ("w1", "w2", "w3")
        for part in ("weight", "scale")
    ),
}
# By transformers' names for the same.
TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    **{f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
}
PUBLISHED_NAMES = {
    *TOP.values(),
    *(f"layers.{layer}.{name}" for layer in range(4) for name in ATTENTION | BLOCKS),
    *(f"layers.{layer}.attn.compressor.{name}" for layer in (1, 2, 3) for name in COMPRESSOR),
    *(f"layers.{layer}.attn.indexer.{name}" for layer in (1, 3) for name in INDEXER),
    "layers.0.ffn.gate.tid2eid",
    *(f"layers.{layer}.ffn.gate.bias" for layer in (1, 2, 3)),
}
QUANTISED = (*(f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")), "indexer.wq_b.weight")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def powers(most: torch.Tensor, largest: float) -> torch.Tensor:
    """The least power of two by which `most` becomes at most the largest value of the format, as e8m0."""
    return torch.exp2(torch.log2(most / largest).ceil()).to(torch.float8_e8m0fnu)


def spread(scales: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    whole = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: shape[0], : shape[1]]


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3, and a scale for each block of 128 rows and columns."""
    rows, columns = weight.shape
    padded = weight.new_zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight.abs()
    most = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).amax(dim=(1, 3))
    scales = powers(most, 448.0)
    return (weight / spread(scales, BLOCK, BLOCK, weight.shape)).to(torch.float8_e4m3fn), scales


def packed_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of two e2m1 codes, the first one low, and a scale for each 32 of a row."""
    scales = powers(weight.view(weight.shape[0], -1, 32).abs().amax(dim=2), 6.0)
    values = weight / spread(scales, 1, 32, weight.shape)
    codes = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(dim=-1) + 8 * (values < 0)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8), scales


def plain(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the codes stand for, by the definition of their format."""
    if codes.dtype is not torch.int8:
        return codes.float() * spread(scales, BLOCK, BLOCK, codes.shape)
    half = codes.view(torch.uint8).long()
    both = torch.stack((half & 15, half >> 4), dim=-1).flatten(1)
    return E2M1[both & 7] * (1 - 2 * (both >> 3)) * spread(scales, 1, 32, both.shape)


class Published:
    """A folder in the published format, and one with the same values as plain fp32."""

    def __init__(self, folder: Path, expert_dtype: str) -> None:
        self.folder, self.plain = folder / "published", folder / "plain"
        make_reference("deepseek-v4-published", self.folder)
        shutil.copytree(self.folder, self.plain)
        stored: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}
        for saved, held in load_file(self.folder / WEIGHTS).items():
            # transformers saves the decoder under a root, and a norm under another's name.
            name = TOP.get(saved) or saved.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")
            codes = self._quantised(name, held, expert_dtype)
            stored[name], values[saved] = held, held
            if codes is not None:
                stored[name], scales = codes
                stored[name.removesuffix("weight") + "scale"] = scales if expert_dtype == "fp4" else scales.float()
                values[saved] = plain(stored[name], scales)
        assert set(stored) == PUBLISHED_NAMES, set(stored) ^ PUBLISHED_NAMES
        # Layers that predict ahead are skipped, whatever they are.
        stored["mtp.0.e_proj.weight"], stored["mtp.0.e_proj.scale"] = fp8_blocks(torch.ones(160, 160))
        save_file(stored, self.folder / WEIGHTS)
        save_file(values, self.plain / WEIGHTS, metadata={"format": "pt"})
        quantisation = {**FP8_CONFIG, "scale_fmt": "ue8m0"}
        change_config(self.folder, quantization_config=quantisation, expert_dtype=expert_dtype)

    @staticmethod
    def _quantised(name: str, held: torch.Tensor, expert_dtype: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        if ".experts." in name and expert_dtype == "fp4":
            return packed_fp4(held)
        return fp8_blocks(held) if name.endswith(QUANTISED) or "experts." in name else None


@pytest.fixture(autouse=True, scope="module")
def published_model() -> Any:
    family, fields = MODELS["deepseek-v4"]
    layer_types = [*LAYER_TYPES, "compressed_sparse_attention"]
    hashed = ["hash_moe", "moe", "moe", "moe"]
    sizes = {**fields, **SIZES, "layer_types": layer_types, "mlp_layer_types": hashed}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "deepseek-v4-published", (family, sizes))
        yield


@pytest.fixture(scope="module", params=["fp4", "fp8"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp(request.param), request.param)


def opened(folder: Path, dtype: torch.dtype) -> CheckpointTensors:
    return open_weights(folder, read_model_spec(folder), dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_exactly_what_the_format_says(published: Published, dtype: torch.dtype) -> None:
    spec, num_equal = read_model_spec(published.folder), 0
    quantised, values = opened(published.folder, dtype), opened(published.plain, dtype)
    for name, (shape, wide) in expected_tensors(spec, ()).items():
        same = name if values.holds(name) else name.replace(".attn.kv_norm.", ".attn.norm.")
        assert torch.equal(quantised.take(name, *shape, wide=wide), values.take(same, *shape, wide=wide)), name
        num_equal += 1
    assert num_equal == sum(not name.endswith(".scale") for name in PUBLISHED_NAMES)


@pytest.mark.parametrize("published", ["fp4"], indirect=True)
@pytest.mark.parametrize("name", ["layers.2.ffn.experts.5.w1", "layers.1.attn.indexer.wq_b"])
def test_weights_are_read_as_transformers_does(published: Published, name: str) -> None:
    """Those without blocks that are cut short, which its reader does not know."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, source = load_file(published.folder / WEIGHTS), opened(published.folder, torch.bfloat16)
    codes, scales = stored[f"{name}.weight"], stored[f"{name}.scale"]
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(source.take(f"model.{name}.weight", *wanted.shape), wanted)


def test_the_logits_are_those_of_transformers(published: Published) -> None:
    tokens = random_tokens(LENGTH, 1)
    bench = Bench(published.folder)
    made = bench.all_logits(Part(bench.sequence(tokens, [1, 2, 3]), 0, LENGTH))
    same = Bench(published.plain)
    assert torch.equal(made, same.all_logits(Part(same.sequence(tokens, [1, 2, 3]), 0, LENGTH)))
    reference = transformers.DeepseekV4ForCausalLM.from_pretrained(
        published.plain, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert (made - wanted).abs().max().item() <= 1e-5 * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("published", ["fp4"], indirect=True)
@pytest.mark.parametrize("device", [CPU, pytest.param(prepared_cuda(), marks=NEEDS_CUDA)])
def test_experts_that_stay_packed_give_the_same_logits(published: Published, device: torch.device) -> None:
    """Cold, and behind a prefix of a page."""
    tokens, made = random_tokens(LENGTH, 1), []
    for kept in ([Mxfp4Experts], []):
        bench = Bench(published.folder, device, torch.bfloat16, kept_formats=kept)
        sequence = bench.sequence(tokens, [1, 2, 3])
        cold = bench.all_logits(Part(sequence, 0, LENGTH))
        made += [cold[PAGE:], bench.all_logits(Part(bench.sequence(tokens, [1, 4, 5]), PAGE, LENGTH))]
    assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("published", ["fp4"], indirect=True)
def test_packed_experts_are_those_of_the_checkpoint(published: Published) -> None:
    spec, name = read_model_spec(published.folder), "model.layers.1.ffn.experts"
    names = [[f"{name}.{expert}.{part}.weight" for part in ("w1", "w3")] for expert in range(6)]
    kept, plain = (
        open_weights(published.folder, spec, torch.bfloat16, CPU, kept_formats=kept).take_experts(names, 32, 160)
        for kept in ([Mxfp4Experts], [])
    )
    assert isinstance(kept, Mxfp4Experts) and isinstance(plain, torch.Tensor)
    assert torch.equal(dequantised(kept, torch.bfloat16), plain)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Published(tmp_path, "fp4").folder


NAN = torch.full((32, 5), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("name", "stored", "reason"),
    [
        ("layers.1.ffn.experts.2.w1.scale", None, "missing"),
        ("layers.1.ffn.experts.2.w1.scale", torch.ones(32, 4).to(torch.float8_e8m0fnu), r"\[32, 4\].*\[32, 5\]"),
        ("layers.1.ffn.experts.2.w1.scale", torch.ones(32, 5, dtype=torch.uint8), "dtype U8.*F8_E8M0"),
        ("layers.1.ffn.experts.2.w1.scale", NAN, "not a finite number"),
        ("layers.1.ffn.experts.2.w1.weight", torch.ones(32, 160).to(torch.float8_e4m3fn), r"\[32, 160\].*\[32, 80\]"),
        ("layers.1.ffn.experts.2.w1.weight", torch.ones(32, 80, dtype=torch.uint8), "dtype U8.*I8"),
        ("layers.1.attn.wq_a.scale", torch.ones(2, 2).to(torch.float8_e8m0fnu), r"\[2, 2\].*\[1, 2\]"),
        ("layers.1.attn.wq_a.scale", torch.tensor([[torch.inf, 1.0]]), "not a finite number"),
        ("layers.1.attn.wq_a.weight", torch.ones(24, 160, dtype=torch.int8), "dtype I8.*F8_E4M3"),
        ("layers.0.ffn.gate.tid2eid", torch.full((VOCAB, 2), 6), "an expert that is none of 0 to 5"),
        ("layers.0.ffn.gate.tid2eid", torch.full((VOCAB, 2), -1), "an expert that is none of 0 to 5"),
    ],
)
def test_what_is_stored_wrong_is_named(folder: Path, name: str, stored: torch.Tensor | None, reason: str) -> None:
    change_weights(folder, **{name: stored})
    with pytest.raises(ModelError, match=reason) as caught:
        Bench(folder)
    assert caught.value.field in (name, f"model.{name}")


def test_e4m3_without_scales_is_told(folder: Path) -> None:
    change_weights(folder, **{"layers.1.attn.wq_a.scale": None})
    with pytest.raises(ModelError, match="dtype F8_E4M3") as caught:
        Bench(folder)
    assert caught.value.field == "layers.1.attn.wq_a.weight"


@pytest.mark.parametrize("dtype", ["nvfp4", 4, ["fp4"]])
def test_another_expert_dtype_is_named(folder: Path, dtype: object) -> None:
    change_config(folder, expert_dtype=dtype)
    with pytest.raises(ModelError, match="not supported; 'fp8' and 'fp4' are") as caught:
        read_model_spec(folder)
    assert caught.value.field == "expert_dtype"


def test_packed_experts_need_whole_blocks(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    change_config(folder, moe_intermediate_size=fields["moe_intermediate_size"] + 8)
    with pytest.raises(ModelError, match=r"rows of 40 must divide by 32") as caught:
        Bench(folder)
    assert caught.value.field == "model.layers.0.ffn.experts.0.w2.weight"
