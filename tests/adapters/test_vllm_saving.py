"""Which pages a step of vLLM completes, with windows, sampled tokens and preemptions."""

from __future__ import annotations

from adapters.vllm.saving import BoundaryState, Completed, Cursor, make_batch, state_table
from tier_client.values import PagePath, PageRange

IDS = [bytes([page]) * 32 for page in range(8)]
A, B = "adapter", "salt"


def pages(found: list[Completed]) -> list[int]:
    return [one.page_id[0] for one in found]


def test_a_prompt_in_chunks() -> None:
    cursor = Cursor(0)
    table = [[1, 2, 3, 4]]
    assert pages(cursor.advance(IDS, table, 0, 6, 4)) == [0]
    assert pages(cursor.advance(IDS, table, 6, 16, 4)) == [1, 2, 3]
    assert pages(cursor.advance(IDS, table, 16, 17, 4)) == []


def test_what_was_loaded_or_reused_is_not_saved() -> None:
    assert pages(Cursor(2).advance(IDS, [[1, 2, 3, 4]], 8, 15, 4)) == [2]


def test_a_page_whose_tokens_are_not_known_waits() -> None:
    """Tokens are drafted, or computed while the one before them is still being sampled."""
    cursor = Cursor(0)
    assert pages(cursor.advance(IDS[:1], [[1, 2, 3]], 0, 10, 4)) == [0]
    assert pages(cursor.advance(IDS[:1], [[1, 2, 3]], 10, 12, 4)) == []
    assert pages(cursor.advance(IDS[:3], [[1, 2, 3]], 12, 13, 4)) == [1, 2]


def test_of_recurrent_states_those_at_ends_of_pages_are_saved() -> None:
    """Not the running one, which a table has, too; nor one within a page."""
    table = state_table([BoundaryState(1, 7, 12), BoundaryState(0, 9, 8), BoundaryState(1, 8, 14)], 1, 4)
    assert table == [0, 0, 7]
    assert state_table([], 1, 4) == []
    found = Cursor(0).advance(IDS, [[1, 2, 3, 4], table], 0, 14, 4)
    assert [one.blocks for one in found] == [(1, 0), (2, 0), (3, 7)]


def test_a_page_that_a_window_has_left_is_saved_of_the_other_groups_only() -> None:
    found = Cursor(0).advance(IDS, [[1, 2, 3], [0, 0, 9]], 0, 12, 4)
    assert [one.blocks for one in found] == [(1, 0), (2, 0), (3, 9)]
    assert Cursor(0).advance(IDS, [[0, 0], [0, 0]], 0, 8, 4) == [], "no group has it any more"


def test_after_a_preemption_the_pages_count_again() -> None:
    """They may have been dropped meanwhile; the tier does not take twice what it has."""
    cursor = Cursor(0)
    assert pages(cursor.advance(IDS, [[1, 2, 3]], 0, 12, 4)) == [0, 1, 2]
    assert pages(cursor.advance(IDS, [[5, 6, 7]], 4, 12, 4)) == [1, 2]


def test_a_table_that_is_shorter_than_the_tokens_has_no_block_there() -> None:
    assert pages(Cursor(0).advance(IDS, [[1]], 0, 8, 4)) == [0]


def test_a_batch_takes_each_page_once_and_tells_ranges() -> None:
    batch = make_batch(A, B, [Completed(IDS[3], (4, 0)), Completed(IDS[5], (5, 6)), Completed(IDS[3], (7, 0))], 2, 100)
    assert batch.path == PagePath(IDS[3] + IDS[5], adapter=A, salt=B)
    assert batch.blocks == ((7, 5), (6,))
    assert batch.ranges() == [PageRange(0, 0, 2), PageRange(1, 1, 2)]
    assert batch.stage_order(7).blocks == ((0, (7, 5)), (1, (6,)))


def test_a_batch_is_limited() -> None:
    assert make_batch(A, B, [Completed(one, (1,)) for one in IDS], 1, 3).path.page_ids == b"".join(IDS[:3])


def test_ranges_have_no_gaps() -> None:
    held = [(1, 1), (2, 0), (3, 3), (4, 4)]
    batch = make_batch(A, B, [Completed(IDS[page], blocks) for page, blocks in enumerate(held)], 2, 100)
    assert batch.ranges() == [PageRange(0, 0, 4), PageRange(1, 0, 1), PageRange(1, 2, 4)]
