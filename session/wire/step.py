"""Step, encoded by the worker and decoded by the cache service.

An item that is malformed is decoded to a BadItem in its place, for the manager to refuse alone.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from protos.v1 import cache_pb2, types_pb2
from session.errors import FieldError, InvalidInput
from session.limits import MAX_GROUPS, MAX_SNAPSHOT_BOUNDARIES, SessionLimits
from session.messages import (
    Ack,
    Acquire,
    Adopt,
    BadItem,
    BadRun,
    CachedRun,
    Extend,
    Inventory,
    Publish,
    Rates,
    Release,
    Shrink,
    Step,
)
from session.wire import fields
from session.wire.parts import (
    decode_pages,
    decode_slot,
    encode_namespace,
    encode_pages,
    encode_slots,
    required_namespace,
)
from session.words import (
    PAGE_ID_BYTES,
    TOKEN_BYTES,
    GroupPages,
    ReleaseReason,
    SequenceId,
    StateSlot,
    TicketId,
    TransferStatus,
)

LENGTH_BYTES = 4

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
        step.extends.sequence_ids = array("Q", [extend.sequence_id for extend in value.extends]).tobytes()
        step.extends.num_tokens = array("I", [extend.num_tokens for extend in value.extends]).tobytes()
        for extend in value.extends:
            if extend.snapshot_at:
                step.extends.leave_at.add(sequence_id=extend.sequence_id, boundary_tokens=extend.snapshot_at)
    for acquire in cast(Sequence[Acquire], value.acquires):
        _fill_acquire(step.acquires.add(), acquire)
    if value.rates is not None:
        step.rates.prefill_tokens_per_s = value.rates.prefill_tokens_per_s
        step.rates.fetch_bytes_per_s = value.rates.fetch_bytes_per_s
        step.rates.spill_bytes_per_s = value.rates.spill_bytes_per_s
    if value.inventory is not None:
        _fill_inventory(step.inventory, value.inventory)
    if value.forgotten:
        step.forgotten = value.forgotten
    if value.shrinks:
        step.shrinks.sequence_ids = array("Q", [shrink.sequence_id for shrink in value.shrinks]).tobytes()
        step.shrinks.num_tokens = array("I", [shrink.num_tokens for shrink in value.shrinks]).tobytes()
    return message


def _fill_inventory(message: cache_pb2.Inventory, value: Inventory) -> None:
    message.is_complete = value.is_complete
    message.SetInParent()
    for run in cast(Sequence[CachedRun], value.runs):
        item = message.runs.add(run=run.run, parent_run=run.parent_run, tokens=run.tokens, page_ids=run.page_ids)
        if run.namespace is not None:
            item.namespace.CopyFrom(encode_namespace(run.namespace))


def _fill_acquire(message: cache_pb2.Acquire, value: Acquire) -> None:
    message.sequence_id = value.sequence_id
    message.namespace.CopyFrom(encode_namespace(value.namespace))
    message.tokens = value.tokens
    message.reserve_pages = value.reserve_pages
    message.chunk_tokens = value.chunk_tokens
    message.priority = value.priority
    message.kept_tokens = value.kept_tokens
    message.bypass_cache = value.bypass_cache
    message.leave_at.extend(value.snapshot_at)


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
        _extends(message.extends, most) if message.HasField("extends") else (),
        _items("step.acquires", message.acquires, most, _acquire, most_tokens),
        _rates(message.rates) if message.HasField("rates") else None,
        _inventory(message.inventory, most, most_tokens) if message.HasField("inventory") else None,
        message.forgotten,
        tuple(map(Shrink, *_lengths(message.shrinks, "step.shrinks", most))) if message.HasField("shrinks") else (),
    )


def _inventory(message: cache_pb2.Inventory, most: int, most_tokens: int) -> Inventory:
    fields.at_most(len(message.runs), "step.inventory.runs", most)
    runs: list[CachedRun | BadRun] = []
    for item in message.runs:
        try:
            runs.append(_run(item, most_tokens))
        except FieldError as error:
            runs.append(BadRun(item.run, error.field, error.reason))
    return Inventory(tuple(runs), message.is_complete)


def _run(message: cache_pb2.CachedRun, most_tokens: int) -> CachedRun:
    fields.nothing_unknown(message, "")
    if message.parent_run and message.HasField("namespace"):
        raise InvalidInput("namespace", "is that of the parent run")
    fields.at_most(len(message.page_ids), "page_ids", MAX_GROUPS)
    for i, page_ids in enumerate(message.page_ids):
        fields.packed(page_ids, f"page_ids[{i}]", PAGE_ID_BYTES)
    return CachedRun(
        message.run,
        message.parent_run,
        None if message.parent_run else required_namespace(message, "namespace"),
        fields.tokens(message.tokens, "tokens", most_tokens, required=True),
        tuple(message.page_ids),
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
        _leave_at(message.leave_at, "leave_at"),
    )


def _leave_at(boundaries: Sequence[int], field: str) -> tuple[int, ...]:
    fields.at_most(len(boundaries), field, MAX_SNAPSHOT_BOUNDARIES)
    return tuple(boundaries)


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


def _extends(message: cache_pb2.Extends, most: int) -> tuple[Extend, ...]:
    extends = tuple(map(Extend, *_lengths(message, "step.extends", most)))
    return _with_leave_at(message.leave_at, extends) if message.leave_at else extends


def _lengths(
    message: cache_pb2.Extends | cache_pb2.Shrinks, field: str, most: int
) -> tuple[Sequence[SequenceId], tuple[int, ...]]:
    """Returns sequence ids and lengths in tokens. Packed arrays that do not fit together belong to no item."""
    packed_ids = message.sequence_ids
    fields.at_most(len(packed_ids) // fields.SEQUENCE_ID_BYTES, f"{field}.sequence_ids", most)
    ids = fields.sequence_ids(packed_ids, f"{field}.sequence_ids")
    packed = message.num_tokens
    if len(packed) != LENGTH_BYTES * len(ids):
        count = fields.packed(packed, f"{field}.num_tokens", LENGTH_BYTES)
        raise InvalidInput(f"{field}.num_tokens", f"has {count} items for {len(ids)} sequence ids")
    return ids, struct.unpack(f"<{len(ids)}I", packed)


def _with_leave_at(messages: Sequence[cache_pb2.LeaveAt], extends: tuple[Extend, ...]) -> tuple[Extend, ...]:
    field = "step.extends.leave_at"
    fields.at_most(len(messages), field, len(extends))
    fields.unique((message.sequence_id for message in messages), f"{field}.sequence_id")
    named = {
        message.sequence_id: _leave_at(message.boundary_tokens, f"{field}.boundary_tokens") for message in messages
    }
    out = tuple(extend._replace(snapshot_at=named.pop(extend.sequence_id, ())) for extend in extends)
    if named:
        raise InvalidInput(f"{field}.sequence_id", f"{next(iter(named))} is no sequence that is extended")
    return out


def _rates(message: cache_pb2.Rates) -> Rates:
    return Rates(
        fields.amount(message.prefill_tokens_per_s, "step.rates.prefill_tokens_per_s"),
        fields.amount(message.fetch_bytes_per_s, "step.rates.fetch_bytes_per_s"),
        fields.amount(message.spill_bytes_per_s, "step.rates.spill_bytes_per_s"),
    )
