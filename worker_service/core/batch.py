"""Host metadata of one launch as flat arrays: what the runner copies to the device once and the kernels read.

    row            tokens computed now          keys that they attend to
    first .. end   positions first .. end - 1   0 .. end - 1, by the block table

Decode rows (exactly one token each) come first, so kernels of their own can serve the first `num_decode_seqs` rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from session.words import NO_PAGE, GroupKind, GroupSpec
from worker_service.core.launch_plan import Row
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import Sequence
from worker_service.core.state_rows import StateRows, state_rows


class CountedRow(NamedTuple):
    """Where the device counts a row's tokens for its penalties.

    `tokens` are all of them so far, prompt first, when they are to be counted anew. None: of those only the last one,
    from which the row continues, is not counted yet.
    """

    slot: int
    tokens: array[int] | None
    prompt_len: int


class SampledRow(NamedTuple):
    """How to sample the token at `position`. `counted` is None for a row without penalties."""

    row: int
    sampling: SamplingParams
    position: int
    counted: CountedRow | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays are 'i' (int32) but for slot_mapping, which is 'q' (int64).

    token_ids, positions     one entry for each computed token
    from_previous            one entry for each decode row, or empty: which sampled row of the launch before has the
                             row's token, which the host does not know yet; -1: token_ids has it
    slot_mapping[group]      one entry for each computed token; empty for a STATE group
    block_tables[group]      num_seqs rows of `table_widths[group]` page ids, padded by NO_PAGE; empty for a STATE group
    cu_seqlens_q, _k         num_seqs + 1 running sums; k counts what was there before and what is new
    states[group]            slots of a STATE group, None for another; nothing at all for a model without states
    logits_rows              index of the last token of each sequence that samples, in the order of `sampled`
    """

    token_ids: array[int]
    from_previous: array[int]
    positions: array[int]
    slot_mapping: tuple[array[int], ...]
    block_tables: tuple[array[int], ...]
    table_widths: tuple[int, ...]
    cu_seqlens_q: array[int]
    cu_seqlens_k: array[int]
    max_seqlen_q: int
    max_seqlen_k: int
    num_seqs: int
    num_decode_seqs: int
    logits_rows: array[int]
    sampled: tuple[SampledRow, ...]
    states: tuple[StateRows | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_q[-1]

    @property
    def has_decode_leaves(self) -> bool:
        """Returns whether a decode row leaves a state at its end besides the rolling one: a branch was named late."""
        return any(row < self.num_decode_seqs for rows in self.states if rows for row in rows.leave_row)


def build_batch(rows: Seq[Row], num_decode_seqs: int, groups: Seq[GroupSpec], page_tokens: int) -> Batch:
    """Returns the rows as one batch. A row samples when it reaches the end of its sequence's tokens.

    Decode rows go through comprehensions: there are many of them, with one token each, while the device waits.
    """
    decode, chunks = rows[:num_decode_seqs], rows[num_decode_seqs:]
    pending = [sequence.sample_index if sequence.num_pending else -1 for sequence, _, _ in decode]
    from_previous = array("i", pending if max(pending, default=-1) >= 0 else ())
    token_ids = array("i", [0 if sequence.num_pending else sequence.tokens[first] for sequence, first, _ in decode])
    positions = array("i", [first for _, first, _ in decode])
    for sequence, first, num_tokens in chunks:
        token_ids.extend(sequence.tokens[first : first + num_tokens])
        positions += _consecutive(first, first + num_tokens)
    ends = [first + num_tokens for _, first, num_tokens in rows]
    cu_q = array("i", accumulate([num_tokens for _, _, num_tokens in rows], initial=0))
    slots, tables, widths = [], [], []
    for group, spec in enumerate(groups):
        is_paged = spec.kind is not GroupKind.STATE
        slots.append(_slots(decode, chunks, group, page_tokens) if is_paged else array("q"))
        table, width = _tables(rows, ends, group, page_tokens) if is_paged else (array("i"), 0)
        tables.append(table)
        widths.append(width)
    sampled = [_sampled(index, row) for index, row in enumerate(rows) if ends[index] == row.sequence.planned_len]
    return Batch(
        token_ids=token_ids,
        from_previous=from_previous,
        positions=positions,
        slot_mapping=tuple(slots),
        block_tables=tuple(tables),
        table_widths=tuple(widths),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=array("i", accumulate(ends, initial=0)),
        max_seqlen_q=max((row.num_tokens for row in rows), default=0),
        max_seqlen_k=max(ends, default=0),
        num_seqs=len(rows),
        num_decode_seqs=num_decode_seqs,
        logits_rows=array("i", [cu_q[entry.row + 1] - 1 for entry in sampled]),
        sampled=tuple(sampled),
        states=state_rows(rows, num_decode_seqs, groups, page_tokens),
    )


def _consecutive(first: int, end: int) -> array[int]:
    """Returns first .. end - 1: a slice, as converting 512 numbers takes 30 us and copying them less than 1."""
    return _numbers(1 << end.bit_length())[first:end]


@cache
def _numbers(size: int) -> array[int]:
    """Returns 0 .. size - 1: made once for each size, and never written to."""
    return array("i", range(size))


def _sampled(index: int, row: Row) -> SampledRow:
    sequence, first, num_tokens = row
    position = first + num_tokens
    counted = _counted(sequence, position) if sequence.sampling.has_penalties else None
    return SampledRow(index, sequence.sampling, position, counted)


def _counted(sequence: Sequence, position: int) -> CountedRow:
    if sequence.counted_len == position - 1:
        return CountedRow(sequence.penalty_slot, None, sequence.prompt_len)
    assert not sequence.num_pending, "tokens that only the device has cannot be counted anew"
    return CountedRow(sequence.penalty_slot, sequence.tokens[:position], sequence.prompt_len)


def _slots(decode: Seq[Row], chunks: Seq[Row], group: int, page_tokens: int) -> array[int]:
    """Returns the slot of each computed token. Chunks are done page by page: they are long and their pages are few."""
    slots = [
        sequence.tables[group][first // page_tokens] * page_tokens + first % page_tokens
        for sequence, first, _ in decode
    ]
    for sequence, first, num_tokens in chunks:
        table, position, end = sequence.tables[group], first, first + num_tokens
        while position < end:
            page, offset = divmod(position, page_tokens)
            count = min(page_tokens - offset, end - position)
            start = table[page] * page_tokens + offset
            slots.extend(range(start, start + count))
            position += count
    return array("q", slots)


def _tables(rows: Seq[Row], ends: Seq[int], group: int, page_tokens: int) -> tuple[array[int], int]:
    """Returns padded block tables and their width: the pages of the longest row, at least 1."""
    width = -(-max(ends, default=0) // page_tokens) or 1
    padding = array("i", (NO_PAGE,)) * width
    flat = array("i")
    for row, end in zip(rows, ends, strict=True):
        num_pages = -(-end // page_tokens)
        flat += row.sequence.tables[group][:num_pages]
        if num_pages < width:
            flat += padding[num_pages:]
    return flat, width
