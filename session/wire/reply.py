"""StepReply and Order, encoded by the cache service and decoded by the worker."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

from protos.v1 import cache_pb2, types_pb2
from session.errors import InvalidInput
from session.messages import ExtendGrant, Forget, Grant, Refusal, Remap, RunRefusal, StepReply
from session.wire import fields
from session.wire.parts import (
    decode_forget,
    decode_match,
    decode_pages,
    decode_slot,
    decode_transfer,
    encode_forget,
    encode_match,
    encode_pages,
    encode_slots,
    fill_transfer,
)
from session.words import PAGE_ID_BYTES, GroupPages, RefusalReason, SequenceId, StateSlot, Transfer

NUMBER_BYTES = 4


def encode_reply(value: StepReply, num_groups: int) -> cache_pb2.ManagerMessage:
    """Fills the message in place: a submessage that is passed on is copied."""
    message = cache_pb2.ManagerMessage()
    reply = message.step_reply
    reply.step_id = value.step_id
    for grant in value.grants:
        _fill_grant(reply.grants.add(), grant)
    if value.extends:
        _fill_extend_grants(reply.extends, value.extends, num_groups)
    for refusal in value.refusals:
        reason = types_pb2.RefusalReason.ValueType(refusal.reason)
        reply.refusals.add(sequence_id=refusal.sequence_id, reason=reason, detail=refusal.detail, field=refusal.field)
    for remap in value.remaps:
        reply.remaps.add(sequence_id=remap.sequence_id).pages.extend(encode_pages(remap.pages))
    if value.free_pages:
        reply.free_pages = array("I", value.free_pages).tobytes()
    for refused in value.run_refusals:
        reason = types_pb2.RefusalReason.ValueType(refused.reason)
        reply.run_refusals.add(run=refused.run, reason=reason, detail=refused.detail, field=refused.field)
    return message


def _fill_grant(message: types_pb2.Grant, value: Grant) -> None:
    message.sequence_id = value.sequence_id
    message.usable_tokens = value.usable_tokens
    message.cached_tokens = value.cached_tokens
    message.fetched_tokens = value.fetched_tokens
    for group, first_page, page_ids in value.tables:
        message.tables.add(group=group, first_page=first_page, page_ids=bytes(page_ids))
    for fetch in value.fetches:
        fill_transfer(message.fetches.add(), fetch)
    message.restore.extend(encode_slots(value.restore))
    message.leave.extend(encode_slots(value.snapshots))
    message.working.extend(encode_slots(value.working))
    message.rolling.extend(encode_slots(value.rolling))
    message.match.CopyFrom(encode_match(value.match))


def _fill_extend_grants(message: cache_pb2.ExtendGrants, grants: Sequence[ExtendGrant], num_groups: int) -> None:
    first_pages: list[int] = []
    num_pages: list[int] = []
    page_ids: list[bytes] = []
    for grant in grants:
        pages = grant.pages
        for _, first_page, ids in pages if len(pages) == num_groups else _without_gaps(pages, num_groups):
            first_pages.append(first_page)
            num_pages.append(len(ids) // PAGE_ID_BYTES)
            page_ids.append(ids)
        if grant.snapshots:
            message.snapshots.add(sequence_id=grant.sequence_id, leave=encode_slots(grant.snapshots))
    message.sequence_ids = array("Q", [grant.sequence_id for grant in grants]).tobytes()
    message.first_pages = array("I", first_pages).tobytes()
    message.num_pages = array("I", num_pages).tobytes()
    message.page_ids = b"".join(page_ids)


def _without_gaps(pages: Iterable[GroupPages], num_groups: int) -> list[GroupPages]:
    """Returns an item for each group; one without pages where there was none."""
    items = [GroupPages(group, 0, b"") for group in range(num_groups)]
    for item in pages:
        items[item.group] = item
    return items


def decode_reply(message: cache_pb2.StepReply, num_groups: int) -> StepReply:
    free_pages = _numbers(message.free_pages, "free_pages")
    if free_pages and len(free_pages) != num_groups:
        raise InvalidInput("free_pages", f"has {len(free_pages)} numbers for {num_groups} groups")
    return StepReply(
        message.step_id,
        tuple([_grant(grant) for grant in message.grants]),
        _extend_grants(message.extends, num_groups) if message.HasField("extends") else (),
        tuple([_refusal(refusal) for refusal in message.refusals]),
        tuple([Remap(SequenceId(remap.sequence_id), _tables(remap.pages, "remaps.pages")) for remap in message.remaps]),
        free_pages,
        tuple([_run_refusal(refused) for refused in message.run_refusals]),
    )


def _tables(messages: Iterable[types_pb2.GroupPages], field: str) -> tuple[GroupPages, ...]:
    return tuple([decode_pages(pages, field) for pages in messages])


def _slots(messages: Iterable[types_pb2.SnapshotSlot]) -> tuple[StateSlot, ...]:
    return tuple(map(decode_slot, messages))


def _grant(message: types_pb2.Grant) -> Grant:
    return Grant(
        sequence_id=SequenceId(message.sequence_id),
        usable_tokens=message.usable_tokens,
        cached_tokens=message.cached_tokens,
        fetched_tokens=message.fetched_tokens,
        tables=_tables(message.tables, "grants.tables"),
        match=decode_match(message.match),
        fetches=tuple([decode_transfer(fetch, "grants.fetches") for fetch in message.fetches]),
        restore=_slots(message.restore),
        snapshots=_slots(message.leave),
        working=_slots(message.working),
        rolling=_slots(message.rolling),
    )


def _refusal(message: types_pb2.Refusal) -> Refusal:
    reason = fields.member(RefusalReason, message.reason, "refusals.reason")
    return Refusal(SequenceId(message.sequence_id), reason, message.detail, message.field)


def _run_refusal(message: cache_pb2.RunRefusal) -> RunRefusal:
    reason = fields.member(RefusalReason, message.reason, "run_refusals.reason")
    return RunRefusal(message.run, reason, message.detail, message.field)


def _extend_grants(message: cache_pb2.ExtendGrants, num_groups: int) -> tuple[ExtendGrant, ...]:
    sequence_ids = fields.sequence_ids(message.sequence_ids, "extends.sequence_ids")
    first_pages = _numbers(message.first_pages, "extends.first_pages")
    counts = _numbers(message.num_pages, "extends.num_pages")
    if not len(first_pages) == len(counts) == len(sequence_ids) * num_groups:
        raise InvalidInput("extends", "first_pages and num_pages need one number per sequence and group")
    page_ids = message.page_ids
    if len(page_ids) != PAGE_ID_BYTES * sum(counts):
        raise InvalidInput("extends.page_ids", "does not hold as many ids as num_pages says")
    snapshots = {item.sequence_id: _slots(item.leave) for item in message.snapshots}
    grants, at, cell = [], 0, 0
    for sequence_id in sequence_ids:
        pages = []
        for group in range(num_groups):
            end = at + PAGE_ID_BYTES * counts[cell]
            if end > at:
                pages.append(GroupPages(group, first_pages[cell], page_ids[at:end]))
            at, cell = end, cell + 1
        grants.append(ExtendGrant(sequence_id, tuple(pages), snapshots.get(sequence_id, ())))
    return tuple(grants)


def _numbers(packed: bytes, field: str) -> tuple[int, ...]:
    return struct.unpack(f"<{fields.packed(packed, field, NUMBER_BYTES)}I", packed)


def encode_order(value: Transfer | Forget) -> cache_pb2.ManagerMessage:
    message = cache_pb2.ManagerMessage()
    if isinstance(value, Forget):
        message.order.forget.CopyFrom(encode_forget(value))
    else:
        fill_transfer(message.order.spill, value)
    return message


def decode_order(message: cache_pb2.Order) -> Transfer | Forget:
    if message.HasField("forget"):
        return decode_forget(message.forget, "order.forget")
    return decode_transfer(message.spill, "order.spill")
