"""Extends and shrinks of a Step: a length in tokens for each of some sequences, as packed arrays.

Arrays that do not fit together belong to no item, so that the whole step is refused.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from protos.v1 import cache_pb2
from session.errors import InvalidInput
from session.messages import Extend, Shrink
from session.wire import fields
from session.wire.parts import decode_boundaries
from session.words import SequenceId

LENGTH_BYTES = 4


def fill_extends(message: cache_pb2.Extends, extends: Sequence[Extend]) -> None:
    _fill_lengths(message, extends)
    for extend in extends:
        if extend.leave_at:
            message.leave_at.add(sequence_id=extend.sequence_id, boundary_tokens=extend.leave_at)


def fill_shrinks(message: cache_pb2.Shrinks, shrinks: Sequence[Shrink]) -> None:
    _fill_lengths(message, shrinks)


def _fill_lengths(message: cache_pb2.Extends | cache_pb2.Shrinks, items: Sequence[Extend] | Sequence[Shrink]) -> None:
    message.sequence_ids = array("Q", [item.sequence_id for item in items]).tobytes()
    message.num_tokens = array("I", [item.num_tokens for item in items]).tobytes()


def decode_extends(message: cache_pb2.Extends, most: int) -> tuple[Extend, ...]:
    extends = tuple(map(Extend, *_lengths(message, "step.extends", most)))
    return _with_boundaries(message.leave_at, extends) if message.leave_at else extends


def decode_shrinks(message: cache_pb2.Shrinks, most: int) -> tuple[Shrink, ...]:
    return tuple(map(Shrink, *_lengths(message, "step.shrinks", most)))


def _lengths(
    message: cache_pb2.Extends | cache_pb2.Shrinks, field: str, most: int
) -> tuple[Sequence[SequenceId], tuple[int, ...]]:
    """Returns sequence ids and lengths in tokens."""
    packed_ids = message.sequence_ids
    fields.at_most(len(packed_ids) // fields.SEQUENCE_ID_BYTES, f"{field}.sequence_ids", most)
    ids = fields.sequence_ids(packed_ids, f"{field}.sequence_ids")
    packed = message.num_tokens
    if len(packed) != LENGTH_BYTES * len(ids):
        count = fields.packed(packed, f"{field}.num_tokens", LENGTH_BYTES)
        raise InvalidInput(f"{field}.num_tokens", f"has {count} items for {len(ids)} sequence ids")
    return ids, struct.unpack(f"<{len(ids)}I", packed)


def _with_boundaries(messages: Sequence[cache_pb2.LeaveAt], extends: tuple[Extend, ...]) -> tuple[Extend, ...]:
    field = "step.extends.leave_at"
    fields.at_most(len(messages), field, len(extends))
    fields.unique((message.sequence_id for message in messages), f"{field}.sequence_id")
    named = {
        message.sequence_id: decode_boundaries(message.boundary_tokens, f"{field}.boundary_tokens")
        for message in messages
    }
    out = tuple(extend._replace(leave_at=named.pop(extend.sequence_id, ())) for extend in extends)
    if named:
        raise InvalidInput(f"{field}.sequence_id", f"{next(iter(named))} is no sequence that is extended")
    return out
