"""Quantised weights are decoded on a CUDA device to the bits that a CPU gives them."""

from __future__ import annotations

import pytest
import torch

from tests.worker_service.cuda_device import NEEDS_CUDA
from tests.worker_service.test_weight_formats import FP8, mxfp4_experts, quantised
from worker_service.model.weight_formats import Fp8WithMxfp4Experts, Mxfp4

CUDA = torch.device("cuda", 0)

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_blocks(dtype: torch.dtype) -> None:
    parts = quantised(torch.randn(1000, 700, generator=torch.Generator().manual_seed(1)))
    made = FP8.decoded([part.to(CUDA) for part in parts], dtype)
    assert torch.equal(made.cpu(), FP8.decoded(parts, dtype))


def test_mxfp4_experts() -> None:
    parts = list(mxfp4_experts(1, 4, 96, 5).values())
    made = Mxfp4().decoded([part.to(CUDA) for part in parts], torch.bfloat16)
    assert torch.equal(made.cpu(), Mxfp4().decoded(parts, torch.bfloat16))


def test_deepseek_v4s_blocks_and_packed_experts() -> None:
    generator = torch.Generator().manual_seed(1)
    codes, scales = quantised(torch.randn(1000, 700, generator=generator))
    packed = torch.randint(-128, 128, (96, 80), generator=generator, dtype=torch.int8)
    exponents = torch.randint(100, 150, (96, 5), generator=generator, dtype=torch.uint8)
    for parts in ([codes, scales.to(torch.float8_e8m0fnu)], [packed, exponents.view(torch.float8_e8m0fnu)]):
        made = Fp8WithMxfp4Experts(FP8).decoded([part.to(CUDA) for part in parts], torch.bfloat16)
        assert torch.equal(made.cpu(), Fp8WithMxfp4Experts(FP8).decoded(parts, torch.bfloat16))
