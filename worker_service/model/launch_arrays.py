"""What the host uploads for a launch, by name: as arrays, as the memory that they are written to, or on the device.

Block tables are sent behind these arrays, as their widths differ from launch to launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from worker_service.core.batch import Batch
from worker_service.model.launch_inputs import PromptLens
from worker_service.model.sampling_arrays import NUM_ARRAYS

PADDING_SLOT = -1

Values = TypeVar("Values")


class LaunchArrays(NamedTuple, Generic[Values]):
    """`slot_mapping` has an entry for each group, `sampling` has the fields of SamplingTensors.

    Lengths and sums are split at the last decode row; the prompts' sums begin with 0 (`split_lengths`).
    """

    from_previous: Values
    token_ids: Values
    positions: Values
    decode_seqlens_k: Values
    logits_rows: Values
    prefill_cu_q: Values
    prefill_cu_k: Values
    sampling: Sequence[Values]
    slot_mapping: Sequence[Values]
    states: Sequence[Values]

    def in_order(self) -> list[Values]:
        """Returns all arrays in the order of the upload."""
        return [
            self.from_previous,
            self.token_ids,
            self.positions,
            self.decode_seqlens_k,
            self.logits_rows,
            self.prefill_cu_q,
            self.prefill_cu_k,
            *self.sampling,
            *self.slot_mapping,
            *self.states,
        ]


def by_name(in_order: Sequence[Values], num_groups: int) -> LaunchArrays[Values]:
    """Returns what `LaunchArrays.in_order` lists, by name again."""
    from_previous, token_ids, positions, decode_seqlens_k, logits_rows, cu_q, cu_k, *rest = in_order
    sampling, slot_mapping = rest[:NUM_ARRAYS], rest[NUM_ARRAYS : NUM_ARRAYS + num_groups]
    states = rest[NUM_ARRAYS + num_groups :]
    return LaunchArrays(
        from_previous, token_ids, positions, decode_seqlens_k, logits_rows, cu_q, cu_k, sampling, slot_mapping, states
    )


def split_lengths(batch: Batch, num_decode: int) -> tuple[array[int], array[int], array[int]]:
    """Returns the key lengths of the decode rows, and running sums of the others', from 0 anew: queries, keys."""
    cu_q, cu_k = batch.cu_seqlens_q, batch.cu_seqlens_k
    return (
        array("i", (end - start for start, end in pairwise(cu_k[: num_decode + 1]))),
        array("i", (end - cu_q[num_decode] for end in cu_q[num_decode:])),
        array("i", (end - cu_k[num_decode] for end in cu_k[num_decode:])),
    )


def prompt_lens(batch: Batch, num_decode: int) -> PromptLens:
    """Returns the new and the cached tokens of each sequence that is not among the decode rows."""
    new = tuple(end - start for start, end in pairwise(batch.cu_seqlens_q[num_decode:]))
    ends = (end - start for start, end in pairwise(batch.cu_seqlens_k[num_decode:]))
    return PromptLens(new, tuple(end - count for end, count in zip(ends, new, strict=True)))
