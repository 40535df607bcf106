from __future__ import annotations

import math
from array import array

import pytest

from session.words import GroupPages, Namespace, SequenceId
from worker_service.core.errors import InvalidField
from worker_service.core.sequence import QueueOrder, Request, SamplingParams, Sequence, place_pages


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
    SamplingParams(max_tokens=1, temperature=0, top_p=1.0, min_p=1.0, seed=(1 << 64) - 1, logprobs=0).validate()


def pages(group: int, first_page: int, *page_ids: int) -> GroupPages:
    return GroupPages(group, first_page, array("I", page_ids).tobytes())


def test_place_pages_appends_overwrites_and_leaves_holes() -> None:
    tables = [array("i"), array("i")]
    place_pages(tables, (pages(0, 0, 5, 6, 7), pages(1, 2, 9)))
    assert [table.tolist() for table in tables] == [[5, 6, 7], [0, 0, 9]]
    place_pages(tables, (pages(0, 1, 60), pages(0, 3, 8), pages(1, 0, 4, 4)))
    assert [table.tolist() for table in tables] == [[5, 60, 7, 8], [4, 4, 9]]


def test_tokens_survive_the_end_of_a_lease() -> None:
    """R34: what comes after a preemption is prompt and generated tokens together."""
    prompt = array("i", [1, 2, 3])
    sequence = Sequence(Request(SequenceId(1), Namespace("m"), prompt.tobytes(), SamplingParams()), QueueOrder(0, 1), 1)
    sequence.tokens.extend([7, 8])
    sequence.computed_len = sequence.published_len = 4
    place_pages(sequence.tables, (pages(0, 0, 5),))
    sequence.forget_lease()
    assert sequence.packed_tokens() == array("i", [1, 2, 3, 7, 8]).tobytes()
    assert (sequence.computed_len, sequence.published_len, len(sequence.tables[0])) == (0, 0, 0)
    assert (sequence.prompt_len, sequence.num_generated) == (3, 2)
