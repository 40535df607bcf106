from __future__ import annotations

from array import array

from session.words import GroupPages, Namespace, SequenceId
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import QueueOrder, Request, Sequence, place_pages


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
