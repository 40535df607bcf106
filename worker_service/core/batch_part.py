"""A batch, or some of its rows, made from another batch: for a launch that failed and is run again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

from worker_service.core.batch import Batch


def with_known_tokens(batch: Batch, previous_token_ids: Seq[int]) -> Batch:
    """Returns the batch with the tokens of the launch before, which are known by now, filled in."""
    token_ids = batch.token_ids[:]
    for at, index in enumerate(batch.from_previous):
        if index >= 0:
            token_ids[at] = previous_token_ids[index]
    return replace(batch, token_ids=token_ids, from_previous=array("i"))


def part_of(batch: Batch, first: int, end: int) -> Batch:
    """Returns the rows [first, end) as a batch of their own, with unchanged positions, slots and page ids.

    All tokens of the batch have to be known.
    """
    assert not batch.from_previous, "a part may run after any other launch"
    start_q, end_q = batch.cu_seqlens_q[first], batch.cu_seqlens_q[end]
    lengths_q = [batch.cu_seqlens_q[row + 1] - batch.cu_seqlens_q[row] for row in range(first, end)]
    lengths_k = [batch.cu_seqlens_k[row + 1] - batch.cu_seqlens_k[row] for row in range(first, end)]
    chosen = [at for at, entry in enumerate(batch.sampled) if first <= entry.row < end]
    return Batch(
        token_ids=batch.token_ids[start_q:end_q],
        from_previous=array("i"),
        positions=batch.positions[start_q:end_q],
        # Empty for a STATE group, and a slice of nothing is nothing.
        slot_mapping=tuple(slots[start_q:end_q] for slots in batch.slot_mapping),
        block_tables=tuple(
            table[first * width : end * width]
            for table, width in zip(batch.block_tables, batch.table_widths, strict=True)
        ),
        table_widths=batch.table_widths,
        cu_seqlens_q=_running_sums(lengths_q),
        cu_seqlens_k=_running_sums(lengths_k),
        max_seqlen_q=max(lengths_q, default=0),
        max_seqlen_k=max(lengths_k, default=0),
        num_seqs=end - first,
        num_decode_seqs=max(0, min(batch.num_decode_seqs, end) - first),
        logits_rows=array("i", [batch.logits_rows[at] - start_q for at in chosen]),
        sampled=tuple(batch.sampled[at]._replace(row=batch.sampled[at].row - first) for at in chosen),
        states=tuple(None if states is None else states.part(first, end) for states in batch.states),
    )


def _running_sums(lengths: list[int]) -> array[int]:
    sums = array("i", (0,))
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums
