"""Host metadata of one launch as flat arrays: what the runner copies to the device once and the kernels read.

Knows no tensor, no device, no queue and no lease; it takes rows and page tables as they are.

    row            tokens computed now          keys that they attend to
    first .. end   positions first .. end - 1   0 .. end - 1, by the block table

Decode rows (exactly one token each) come first, so kernels of their own can serve the first `num_decode_seqs` rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from worker_service.core.launch_plan import Row
from worker_service.core.ports import NO_PAGE, GroupKind, GroupSpec
from worker_service.core.sequence import SamplingParams


class SampledRow(NamedTuple):
    """How to choose the token at `position`. `history` copies the tokens before it, where a penalty asks for them."""

    row: int
    sampling: SamplingParams
    position: int
    history: array[int] | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays are 'i' (int32) but for slot_mapping, which is 'q' (int64).

    token_ids, positions     one entry for each computed token
    slot_mapping[group]      one entry for each computed token; empty for a STATE group
    block_tables[group]      num_seqs rows of `table_widths[group]` page ids, padded by NO_PAGE; empty for a STATE group
    cu_seqlens_q, _k         num_seqs + 1 running sums; k counts what was there before and what is new
    logits_rows              index of the last token of each sequence that samples, in the order of `sampled`
    """

    token_ids: array[int]
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

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_q[-1]

    @property
    def total_keys(self) -> int:
        return self.cu_seqlens_k[-1]


def token_rows(cu_seqlens: Seq[int]) -> array[int]:
    """The row of each token: of each new one for cu_seqlens_q, of each key (as a gather needs it) for cu_seqlens_k."""
    rows = array("i")
    for row, (start, end) in enumerate(pairwise(cu_seqlens)):
        rows.extend(array("i", (row,)) * (end - start))
    return rows


def build_batch(rows: Seq[Row], num_decode_seqs: int, groups: Seq[GroupSpec], page_tokens: int) -> Batch:
    """Lay the rows out one after the other. A row samples when it reaches the end of its sequence's tokens."""
    token_ids, positions = array("i"), array("i")
    cu_q, cu_k = array("i", (0,)), array("i", (0,))
    for sequence, first, num_tokens in rows:
        end = first + num_tokens
        token_ids.extend(sequence.tokens[first:end])
        positions.extend(range(first, end))
        cu_q.append(cu_q[-1] + num_tokens)
        cu_k.append(cu_k[-1] + end)
    paged = [group.kind is not GroupKind.STATE for group in groups]
    tables = [
        _tables(rows, group, page_tokens) if is_paged else (array("i"), 0) for group, is_paged in enumerate(paged)
    ]
    sampled = tuple(_sampled(index, row) for index, row in enumerate(rows) if row.end == len(row.sequence.tokens))
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=tuple(
            _slots(rows, group, page_tokens) if is_paged else array("q") for group, is_paged in enumerate(paged)
        ),
        block_tables=tuple(table for table, _ in tables),
        table_widths=tuple(width for _, width in tables),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max((row.num_tokens for row in rows), default=0),
        max_seqlen_k=max((row.end for row in rows), default=0),
        num_seqs=len(rows),
        num_decode_seqs=num_decode_seqs,
        logits_rows=array("i", (cu_q[entry.row + 1] - 1 for entry in sampled)),
        sampled=sampled,
    )


def _sampled(index: int, row: Row) -> SampledRow:
    sampling = row.sequence.sampling
    # A copy: the launch runs in a thread, and an array that a tensor looks at cannot grow.
    history = row.sequence.tokens[:] if sampling.repetition_penalty != 1.0 else None
    return SampledRow(index, sampling, row.end, history)


def _slots(rows: Seq[Row], group: int, page_tokens: int) -> array[int]:
    """Page by page, as a prompt's chunk is long and its pages are few."""
    slots = array("q")
    for sequence, first, num_tokens in rows:
        table, position, end = sequence.tables[group], first, first + num_tokens
        while position < end:
            page, offset = divmod(position, page_tokens)
            count = min(page_tokens - offset, end - position)
            start = table[page] * page_tokens + offset
            slots.extend(range(start, start + count))
            position += count
    return slots


def _tables(rows: Seq[Row], group: int, page_tokens: int) -> tuple[array[int], int]:
    """Rows of equal width: the pages of the longest row, and at least one so that no row is empty."""
    width = max((-(-row.end // page_tokens) for row in rows), default=0) or 1
    hole = array("i", (NO_PAGE,))
    flat = array("i")
    for row in rows:
        num_pages = -(-row.end // page_tokens)
        flat.extend(row.sequence.tables[group][:num_pages])
        flat.extend(hole * (width - num_pages))
    return flat, width
