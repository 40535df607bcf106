"""Models whose experts are stored in fp8 or mxfp4: folders of tiny ones, and what quantises experts in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kernels.grouped_linear import Fp8Experts, Mxfp4Experts
from tests.worker_service.loaded_tensors import StoredAs
from tests.worker_service.model_kit import MODELS, SIZES, config_of, random_reference
from tests.worker_service.test_deepseek_v4_weights import packed_fp4
from tests.worker_service.test_weight_formats import change_config, change_weights, quantised, store_as_fp8
from worker_service.model.checkpoint_files import WEIGHTS

FORMATS = (Fp8Experts, Mxfp4Experts)
# Rows and columns of more than a block, the last one of a row cut short.
FP8_SIZES = {"hidden_size": 160, "moe_intermediate_size": 128, "num_hidden_layers": 2}
MXFP4_SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}


def make_fp8(folder: Path, model: str, **sizes: Any) -> None:
    """Write a folder with fp8 blocks."""
    _make(folder, model, {**FP8_SIZES, **sizes})
    store_as_fp8(folder)


def make_mxfp4(folder: Path, **sizes: Any) -> None:
    """Write a folder of gpt-oss' layers, by its names."""
    _make(folder, "gpt-oss", {**MXFP4_SIZES, **sizes})
    changes: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            values, scales = (torch.stack(parts) for parts in zip(*map(_as_mxfp4, weight.transpose(1, 2)), strict=True))
            changes |= {
                name: None,
                f"{name}_blocks": values.view(*scales.shape, 16),
                f"{name}_scales": scales,
            }
    change_weights(folder, **changes)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})


def _make(folder: Path, model: str, sizes: dict[str, Any]) -> None:
    family, fields = MODELS[model]
    config = config_of(family, {**SIZES, **fields, **sizes})
    random_reference(config, seed=len(model), spread=0.15).save_pretrained(folder)


def _as_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantised(weight.float().cpu())
    return values.to(weight.device), scales.to(weight.device)


def _as_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = (part.view(torch.uint8) for part in packed_fp4(weight.float().cpu().contiguous()))
    return values.to(weight.device), scales.to(weight.device)


AS_FP8, AS_MXFP4 = StoredAs(Fp8Experts, _as_fp8), StoredAs(Mxfp4Experts, _as_mxfp4)
