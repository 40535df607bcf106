"""Host metadata of a launch, against hand-worked examples and a slow, obvious builder."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from session.words import GroupKind, GroupSpec, Namespace, SequenceId
from tests.examples import examples
from tests.worker_service.scheduler_machine import full_group, packed, window_group
from worker_service.core.batch import Batch, build_batch
from worker_service.core.launch_plan import Row
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import QueueOrder, Request, Sequence

GROUPS = (full_group(1000),)


def sequence(tokens: Seq[int], *tables: Seq[int], sampling: SamplingParams | None = None) -> Sequence:
    request = Request(SequenceId(1), Namespace("m"), packed(list(tokens)), sampling or SamplingParams())
    made = Sequence(request, QueueOrder(0, 1), len(tables))
    for table, page_ids in zip(made.tables, tables, strict=True):
        table.extend(page_ids)
    return made


def row(cached: int, new: int, page_tokens: int = 4, first_page: int = 1, more: int = 0) -> Row:
    """A sequence with `cached` tokens there, `new` to compute now and `more` after those."""
    length = cached + new + more
    pages = range(first_page, first_page + -(-length // page_tokens))
    return Row(sequence(range(100, 100 + length), pages), cached, new)


def batch_of(*rows: Row, num_decode: int = 0, page_tokens: int = 4) -> Batch:
    return build_batch(rows, num_decode, GROUPS, page_tokens)


def token_rows(cu_seqlens: Seq[int]) -> array[int]:
    """The row of each token: of each new one for cu_seqlens_q, of each key (as a gather needs it) for cu_seqlens_k."""
    rows = array("i")
    for row, (start, end) in enumerate(pairwise(cu_seqlens)):
        rows.extend(array("i", (row,)) * (end - start))
    return rows


def test_positions_start_at_the_cached_length() -> None:
    """H27: cached [1, 2], new [1, 2] in a packed batch; and without a cached prefix."""
    assert batch_of(row(1, 1), row(2, 2)).positions.tolist() == [1, 2, 3]
    assert batch_of(row(0, 2)).positions.tolist() == [0, 1]


def test_running_sums() -> None:
    """H28: q counts new tokens, k counts cached and new ones."""
    batch = batch_of(row(5, 4), row(0, 3), row(2, 6))
    assert batch.cu_seqlens_q.tolist() == [0, 4, 7, 13]
    assert batch.cu_seqlens_k.tolist() == [0, 9, 12, 20]
    assert token_rows(batch.cu_seqlens_q).tolist() == [0] * 4 + [1] * 3 + [2] * 6
    assert token_rows(batch.cu_seqlens_k).tolist() == [0] * 9 + [1] * 3 + [2] * 8
    assert batch.num_tokens == 13


def test_running_sums_of_a_hand_worked_gather() -> None:
    """H26: cached [3, 0], new [2, 4]."""
    batch = batch_of(row(3, 2, page_tokens=2), row(0, 4, page_tokens=2), page_tokens=2)
    assert batch.cu_seqlens_k.tolist() == [0, 5, 9]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 6]


@pytest.mark.parametrize(("cached", "new", "longest"), [((100, 0), (1, 60), 101), ((100, 50), (10, 100), 150)])
def test_longest_keys_are_a_maximum_of_sums(cached: tuple[int, ...], new: tuple[int, ...], longest: int) -> None:
    """H29: neither the sum of the maxima nor the maximum of either."""
    batch = batch_of(*(row(c, n) for c, n in zip(cached, new, strict=True)))
    assert batch.max_seqlen_k == longest
    assert batch.max_seqlen_q == max(new)


def test_slot_mapping() -> None:
    """H30: page 4, table [10, 20, 30, 40], six tokens from 0."""
    computed = Row(sequence(range(6), [10, 20, 30, 40]), 0, 6)
    assert batch_of(computed).slot_mapping[0].tolist() == [40, 41, 42, 43, 80, 81]


def test_slots_start_inside_a_page() -> None:
    """R17: the first new token goes to page cached // page at offset cached % page."""
    computed = Row(sequence(range(11), [7, 3, 9]), 6, 4)
    assert batch_of(computed).slot_mapping[0].tolist() == [3 * 4 + 2, 3 * 4 + 3, 9 * 4, 9 * 4 + 1]


def test_slots_of_far_pages_need_64_bits() -> None:
    far = (1 << 31) - 1
    computed = Row(sequence(range(2), [far]), 0, 2)
    assert batch_of(computed, page_tokens=16).slot_mapping[0].tolist() == [far * 16, far * 16 + 1]


def test_decode_row_in_a_mixed_batch() -> None:
    """F2, F8: it counts its cached keys and itself, once, and its token goes to one slot."""
    batch = batch_of(row(9, 1), row(0, 5, first_page=20), num_decode=1)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 6]
    assert batch.cu_seqlens_k.tolist() == [0, 10, 15]
    assert batch.token_ids.tolist() == [109, 100, 101, 102, 103, 104]
    assert batch.slot_mapping[0].tolist()[0] == 3 * 4 + 1
    assert batch.num_decode_seqs == 1


def test_block_tables_are_padded_to_the_longest_row_with_no_page() -> None:
    batch = batch_of(row(9, 1), row(0, 3, first_page=20))
    assert batch.table_widths == (3,)
    assert batch.block_tables[0].tolist() == [1, 2, 3, 20, 0, 0]


def test_block_tables_end_with_the_keys_of_the_launch() -> None:
    """Pages for later chunks are no business of this launch."""
    batch = batch_of(row(0, 4, more=20))
    assert batch.table_widths == (1,)
    assert batch.block_tables[0].tolist() == [1]


def test_only_rows_that_reach_the_end_sample() -> None:
    batch = batch_of(row(4, 1), row(0, 4, more=3), row(2, 3))
    assert [sampled.row for sampled in batch.sampled] == [0, 2]
    assert [sampled.position for sampled in batch.sampled] == [5, 5]
    assert batch.logits_rows.tolist() == [0, 7]


def test_tokens_are_counted_anew_only_where_the_device_has_not_counted_them() -> None:
    """The tokens are a copy: an array that a tensor looks at cannot grow, and the sequence must."""
    plain = sequence(range(3), [1])
    penal = sequence(range(3), [2], sampling=SamplingParams(presence_penalty=0.5))
    penal.penalty_slot = 4
    first, second = batch_of(Row(plain, 0, 3), Row(penal, 0, 3)).sampled
    assert first.counted is None
    assert second.counted is not None
    assert second.counted.tokens is not None
    with memoryview(second.counted.tokens):
        penal.tokens.append(3)
    assert second.counted == (4, array("i", [0, 1, 2]), 3)
    penal.counted_len = 3
    assert batch_of(Row(penal, 3, 1)).sampled[0].counted == (4, None, 3)
    penal.counted_len = 2
    assert batch_of(Row(penal, 3, 1)).sampled[0].counted == (4, array("i", [0, 1, 2, 3]), 3)


def test_a_prompt_of_one_token_is_counted() -> None:
    penal = sequence([5], [1], sampling=SamplingParams(repetition_penalty=1.5))
    assert batch_of(Row(penal, 0, 1)).sampled[0].counted == (penal.penalty_slot, array("i", [5]), 1)


def test_groups_have_tables_of_their_own_and_holes_stay() -> None:
    groups = (full_group(9), window_group(9, 4), GroupSpec("state", GroupKind.STATE, 4, 0))
    computed = Row(sequence(range(10), [1, 2, 3], [0, 5, 6], []), 8, 2)
    batch = build_batch([computed], 0, groups, 4)
    assert [table.tolist() for table in batch.block_tables] == [[1, 2, 3], [0, 5, 6], []]
    assert [slots.tolist() for slots in batch.slot_mapping] == [[12, 13], [24, 25], []]
    assert batch.table_widths == (3, 3, 0)


def test_empty_batch() -> None:
    """F5: nothing to do is not an error."""
    batch = batch_of()
    assert batch.cu_seqlens_q.tolist() == batch.cu_seqlens_k.tolist() == [0]
    assert (batch.num_tokens, batch.max_seqlen_q, batch.max_seqlen_k, batch.num_seqs) == (0, 0, 0, 0)


def test_types_are_what_the_device_copy_expects() -> None:
    batch = batch_of(row(3, 2), row(1, 1))
    for metadata in (batch.token_ids, batch.positions, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.logits_rows):
        assert metadata.typecode == "i"
    assert batch.slot_mapping[0].typecode == "q"
    assert batch.block_tables[0].typecode == "i"


@st.composite
def random_rows(draw: st.DrawFn) -> tuple[list[Row], int]:
    page_tokens = draw(st.sampled_from([1, 2, 3, 16, 64]))
    rows, next_page = [], 1
    for _ in range(draw(st.integers(1, 6))):
        cached, new, more = draw(st.integers(0, 70)), draw(st.integers(1, 70)), draw(st.integers(0, 5))
        rows.append(row(cached, new, page_tokens, next_page, more))
        next_page += len(rows[-1].sequence.tables[0])
    order = draw(st.permutations(range(next_page)))  # pages are anywhere
    for made in rows:
        table = made.sequence.tables[0]
        table[:] = array("i", [order[page] + 1 for page in table])
    return rows, page_tokens


@settings(max_examples=examples(150))
@given(random_rows())
def test_every_array_agrees_with_the_obvious_builder(made: tuple[list[Row], int]) -> None:
    """R17, R20, F1: sequences with different cached lengths in one batch, token by token."""
    rows, page_tokens = made
    batch = build_batch(rows, 0, GROUPS, page_tokens)
    assert len(batch.positions) == len(batch.slot_mapping[0]) == batch.cu_seqlens_q[-1] == len(batch.token_ids)
    expected = [(index, position) for index, made in enumerate(rows) for position in range(made.first_token, made.end)]
    for token, (index, position) in enumerate(expected):
        owner = rows[index].sequence
        assert batch.positions[token] == position
        assert batch.token_ids[token] == owner.tokens[position]
        page, offset = divmod(position, page_tokens)
        assert batch.slot_mapping[0][token] == owner.tables[0][page] * page_tokens + offset
    assert token_rows(batch.cu_seqlens_q).tolist() == [index for index, _ in expected]
    width = batch.table_widths[0]
    for index, made_row in enumerate(rows):
        table = batch.block_tables[0][index * width : (index + 1) * width].tolist()
        num_pages = -(-made_row.end // page_tokens)
        assert table == made_row.sequence.tables[0][:num_pages].tolist() + [0] * (width - num_pages)
        assert batch.cu_seqlens_k[index + 1] - batch.cu_seqlens_k[index] == made_row.end
