"""Where a setting of segments of attention would change nothing, a worker says why."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from tests.worker_service.test_attention_segments_gpu import CONFIG
from worker_service.model import attention
from worker_service.model.attention import reason_against_segments
from worker_service.model.config import parse_model_spec

E4M3 = torch.float8_e4m3fn
WINDOWS = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512}


@pytest.mark.parametrize(
    ("change", "page_dtype", "reason"),
    [
        ({}, None, None),
        ({}, E4M3, None),
        ({"head_dim": 64}, None, None),
        ({"head_dim": 64}, E4M3, "the kernel takes no heads of 64 elements with such pages"),
        ({"head_dim": 72}, None, "the kernel takes no heads of 72 elements with such pages"),
        ({"head_dim": 256}, None, "no layer attends to all keys with heads of up to 128 elements"),
        (WINDOWS, None, "no layer attends to all keys with heads of up to 128 elements"),
    ],
    ids=str,
)
def test_why_a_model_has_no_segments(
    change: dict[str, object], page_dtype: torch.dtype | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_model_spec({**CONFIG, **change})
    device = torch.device("cpu")
    assert (
        reason_against_segments(spec, Backend.AUTO, page_dtype, device)
        == "only the kernel for Hopper GPUs has segments"
    )
    monkeypatch.setattr(attention, "is_hopper", lambda device: True)
    assert reason_against_segments(spec, Backend.AUTO, page_dtype, device) == reason
    assert reason_against_segments(spec, Backend.REFERENCE, page_dtype, device) is not None
