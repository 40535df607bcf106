from __future__ import annotations

import math

import pytest

from worker_service.core.errors import InvalidField
from worker_service.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("temperature", 1e39),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 3e38),
        ("stop_token_ids", frozenset(range(1025))),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.01),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", math.inf),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop", ("a", "")),
        ("stop", ("a",) * 65),
        ("stop_token_ids", frozenset({-1})),
        ("logprobs", 65),
        ("logprobs", -1),
    ],
)
def test_sampling_errors_name_the_field(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=field) as caught:
        params.validate()
    assert caught.value.field == field


def test_the_bounds_themselves_are_fine() -> None:
    SamplingParams().validate()
    SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0).validate()
    SamplingParams(max_tokens=1, temperature=0, top_p=1.0, min_p=1.0, seed=(1 << 64) - 1, logprobs=0).validate()
