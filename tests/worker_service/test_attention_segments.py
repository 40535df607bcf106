"""Where a setting of segments of attention would change nothing, a worker says why."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Backend
from tests.worker_service.test_attention_segments_gpu import CONFIG
from worker_service.model import attention
from worker_service.model.attention import few_rows_workspace_bytes, reason_against_segments, segments_workspace_bytes
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


@pytest.mark.parametrize(
    ("change", "segment_tokens", "states"),
    [({}, 8192, 1), ({}, 0, 0), ({"head_dim": 256}, 8192, 0), (WINDOWS, 8192, 1)],
    ids=str,
)
def test_what_segments_take_beside_the_pools(
    change: dict[str, object], segment_tokens: int, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an H200's 132 multiprocessors: 9 tiles of 128 rows each, of 128 values and two numbers in fp32."""
    spec, device = parse_model_spec({**CONFIG, **change}), torch.device("cpu")
    assert segments_workspace_bytes(spec, segment_tokens, device) == 0
    monkeypatch.setattr(attention, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention, "num_multiprocessors", lambda device: 132)
    assert segments_workspace_bytes(spec, segment_tokens, device) == states * 132 * 9 * 128 * (128 + 2) * 4


@pytest.mark.parametrize(
    ("change", "segment_tokens", "scratches"),
    [({}, 0, 1), ({}, 8192, 0), ({"head_dim": 256}, 0, 0), (WINDOWS, 0, 1)],
    ids=str,
)
def test_what_prompts_of_few_tokens_take_beside_the_pools(
    change: dict[str, object], segment_tokens: int, scratches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 1,024 tiles of 64 rows and 128 keys, three numbers of each row, and states of 16 tiles of 64 rows."""
    spec, device = parse_model_spec({**CONFIG, **change}), torch.device("cpu")
    assert few_rows_workspace_bytes(spec, segment_tokens, device) == 0
    monkeypatch.setattr(attention, "is_hopper", lambda device: True)
    bytes_of_one = 1024 * 64 * (128 * 2 + 3 * 4) + 16 * 64 * (2 + 128 + 2) * 4
    assert few_rows_workspace_bytes(spec, segment_tokens, device) == scratches * bytes_of_one
