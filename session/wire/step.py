"""Step, encoded by the worker and decoded by the cache service: its items one by one; packed ones are in lengths.py.

An item that is malformed is decoded to a BadItem in its place, for the manager to refuse alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from protos.v1 import cache_pb2, types_pb2
from session.errors import FieldError, InvalidInput
from session.limits import MAX_GROUPS, SessionLimits
from session.messages import Ack, Acquire, Adopt, BadItem, Publish, Rates, Release, Step
from session.wire import fields
from session.wire.inventory import decode_inventory, fill_inventory
from session.wire.lengths import decode_extends, decode_shrinks, fill_extends, fill_shrinks
from session.wire.parts import (
    decode_boundaries,
    decode_pages,
    decode_slot,
    encode_namespace,
    encode_pages,
    encode_slots,
    required_namespace,
)
from session.words import TOKEN_BYTES, GroupPages, ReleaseReason, SequenceId, StateSlot, TicketId, TransferStatus

T = TypeVar("T")
M = TypeVar("M", cache_pb2.Publish, cache_pb2.Release, cache_pb2.Adopt, cache_pb2.Acquire)


def encode_step(value: Step) -> cache_pb2.WorkerMessage:
    """Fills the message in place: a submessage that is passed on is copied."""
    message = cache_pb2.WorkerMessage()
    step = message.step
    step.step_id = value.step_id
    for ack in value.acks:
        status = cache_pb2.TransferStatus.ValueType(ack.status)
        step.acks.add(
            ticket=ack.ticket, num_done=ack.num_done, status=status, num_bytes=ack.num_bytes, seconds=ack.seconds
        )
    # Only decoding makes a BadItem: a step that is sent has none.
    for publish in cast(Sequence[Publish], value.publishes):
        step.publishes.add(
            sequence_id=publish.sequence_id, tokens=publish.tokens, computed_tokens=publish.computed_tokens
        )
    for release in cast(Sequence[Release], value.releases):
        reason = cache_pb2.ReleaseReason.ValueType(release.reason)
        step.releases.add(sequence_id=release.sequence_id, reason=reason, rolling_tokens=release.rolling_tokens)
    for adopt in cast(Sequence[Adopt], value.adopts):
        _fill_adopt(step.adopts.add(), adopt)
    if value.extends:
        fill_extends(step.extends, value.extends)
    for acquire in cast(Sequence[Acquire], value.acquires):
        _fill_acquire(step.acquires.add(), acquire)
    if value.rates is not None:
        step.rates.prefill_tokens_per_s = value.rates.prefill_tokens_per_s
        step.rates.fetch_bytes_per_s = value.rates.fetch_bytes_per_s
        step.rates.spill_bytes_per_s = value.rates.spill_bytes_per_s
    if value.inventory is not None:
        fill_inventory(step.inventory, value.inventory)
    if value.forgotten:
        step.forgotten = value.forgotten
    if value.shrinks:
        fill_shrinks(step.shrinks, value.shrinks)
    return message


def _fill_acquire(message: cache_pb2.Acquire, value: Acquire) -> None:
    message.sequence_id = value.sequence_id
    message.namespace.CopyFrom(encode_namespace(value.namespace))
    message.tokens = value.tokens
    message.reserve_pages = value.reserve_pages
    message.chunk_tokens = value.chunk_tokens
    message.priority = value.priority
    message.kept_tokens = value.kept_tokens
    message.bypass_cache = value.bypass_cache
    message.leave_at.extend(value.leave_at)


def _fill_adopt(message: cache_pb2.Adopt, value: Adopt) -> None:
    message.sequence_id = value.sequence_id
    message.namespace.CopyFrom(encode_namespace(value.namespace))
    message.tokens = value.tokens
    message.computed_tokens = value.computed_tokens
    message.tables.extend(encode_pages(value.tables))
    message.working.extend(encode_slots(value.working))
    message.rolling.extend(encode_slots(value.rolling))
    message.priority = value.priority
    message.bypass_cache = value.bypass_cache


def decode_step(message: cache_pb2.Step, limits: SessionLimits) -> Step:
    """Returns the step, with a BadItem in place of each malformed item. Raises InvalidInput, TooMany for what is in no
    item."""
    if not message.step_id:
        raise InvalidInput("step.step_id", "must be at least 1")
    most, most_tokens = limits.max_step_items, limits.max_sequence_tokens
    return Step(
        message.step_id,
        _acks(message.acks, most),
        _items("step.publishes", message.publishes, most, _publish, most_tokens),
        _items("step.releases", message.releases, most, _release, most_tokens),
        _items("step.adopts", message.adopts, most, _adopt, most_tokens),
        decode_extends(message.extends, most) if message.HasField("extends") else (),
        _items("step.acquires", message.acquires, most, _acquire, most_tokens),
        _rates(message.rates) if message.HasField("rates") else None,
        decode_inventory(message.inventory, most, most_tokens) if message.HasField("inventory") else None,
        message.forgotten,
        decode_shrinks(message.shrinks, most) if message.HasField("shrinks") else (),
    )


def _items(
    field: str, items: Sequence[M], most: int, decoded: Callable[[M, int], T], most_tokens: int
) -> tuple[T | BadItem, ...]:
    if not items:
        return ()
    fields.at_most(len(items), field, most)
    out: list[T | BadItem] = []
    for item in items:
        try:
            out.append(decoded(item, most_tokens))
        except FieldError as error:
            out.append(BadItem(SequenceId(item.sequence_id), error.field, error.reason))
    return tuple(out)


def _acks(acks: Sequence[cache_pb2.Ack], most: int) -> tuple[Ack, ...]:
    if not acks:
        return ()
    fields.at_most(len(acks), "step.acks", most)
    return tuple([_ack(ack, f"step.acks[{i}]") for i, ack in enumerate(acks)])


def _ack(message: cache_pb2.Ack, field: str) -> Ack:
    return Ack(
        TicketId(message.ticket),
        message.num_done,
        fields.member(TransferStatus, message.status, f"{field}.status"),
        message.num_bytes,
        fields.amount(message.seconds, f"{field}.seconds"),
    )


# Items: fields are named from the item on.


def _publish(message: cache_pb2.Publish, most_tokens: int) -> Publish:
    new_tokens = message.tokens
    if len(new_tokens) % TOKEN_BYTES or len(new_tokens) > most_tokens * TOKEN_BYTES:
        fields.tokens(new_tokens, "tokens", most_tokens)
    return Publish(SequenceId(message.sequence_id), new_tokens, message.computed_tokens)


def _release(message: cache_pb2.Release, most_tokens: int) -> Release:
    reason = fields.member(ReleaseReason, message.reason, "reason")
    return Release(SequenceId(message.sequence_id), reason, message.rolling_tokens)


def _acquire(message: cache_pb2.Acquire, most_tokens: int) -> Acquire:
    fields.nothing_unknown(message, "")
    return Acquire(
        SequenceId(message.sequence_id),
        required_namespace(message, "namespace"),
        fields.tokens(message.tokens, "tokens", most_tokens, required=not message.kept_tokens),
        message.reserve_pages,
        message.chunk_tokens,
        message.priority,
        message.kept_tokens,
        message.bypass_cache,
        decode_boundaries(message.leave_at, "leave_at"),
    )


def _adopt(message: cache_pb2.Adopt, most_tokens: int) -> Adopt:
    fields.nothing_unknown(message, "")
    for name in ("tables", "working", "rolling"):
        fields.at_most(len(getattr(message, name)), name, MAX_GROUPS)
    tables = tuple(_table(pages, f"tables[{i}]") for i, pages in enumerate(message.tables))
    fields.unique((pages.group for pages in tables), "tables")
    return Adopt(
        sequence_id=SequenceId(message.sequence_id),
        namespace=required_namespace(message, "namespace"),
        tokens=fields.tokens(message.tokens, "tokens", most_tokens, required=True),
        computed_tokens=message.computed_tokens,
        tables=tables,
        working=tuple(_slot(slot, f"working[{i}]") for i, slot in enumerate(message.working)),
        rolling=tuple(_slot(slot, f"rolling[{i}]") for i, slot in enumerate(message.rolling)),
        priority=message.priority,
        bypass_cache=message.bypass_cache,
    )


def _table(message: types_pb2.GroupPages, field: str) -> GroupPages:
    fields.nothing_unknown(message, field)
    fields.in_range(message.group, f"{field}.group", 0, MAX_GROUPS - 1)
    return decode_pages(message, field)


def _slot(message: types_pb2.SnapshotSlot, field: str) -> StateSlot:
    fields.nothing_unknown(message, field)
    fields.in_range(message.group, f"{field}.group", 0, MAX_GROUPS - 1)
    return decode_slot(message)


def _rates(message: cache_pb2.Rates) -> Rates:
    return Rates(
        fields.amount(message.prefill_tokens_per_s, "step.rates.prefill_tokens_per_s"),
        fields.amount(message.fetch_bytes_per_s, "step.rates.fetch_bytes_per_s"),
        fields.amount(message.spill_bytes_per_s, "step.rates.spill_bytes_per_s"),
    )
