"""The session's words between protobuf and the worker's core.

Knows no stream and no scheduler. Each message is sealed with a checksum; one that fails it, and a malformed one, is a
SessionLost: nothing after it can be trusted.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable
from typing import cast

from google.protobuf.message import DecodeError

from protos.v1 import cache_pb2, types_pb2
from session.messages import (
    Ack,
    Acquire,
    Adopt,
    Extend,
    ExtendGrant,
    Grant,
    Publish,
    Refusal,
    Release,
    Remap,
    SessionLimits,
    Step,
    StepReply,
    Welcome,
)
from session.words import (
    GroupPages,
    GroupSpec,
    Match,
    MissReason,
    Namespace,
    PageId,
    RefusalReason,
    SequenceId,
    SnapshotSlot,
    TicketId,
    Transfer,
    TransferPages,
)
from worker_service.core.errors import SessionLost

_MISS_REASONS = {int(reason): reason for reason in MissReason}
MAY_BE_ZERO = {"max_kept_bytes", "grace_ms"}


def seal(message: cache_pb2.WorkerMessage) -> cache_pb2.SessionRequest:
    body = message.SerializeToString()
    return cache_pb2.SessionRequest(body=body, crc32=zlib.crc32(body))


def unseal(response: cache_pb2.SessionResponse) -> cache_pb2.ManagerMessage:
    """Returns the message inside; raises SessionLost when it was damaged on its way."""
    if zlib.crc32(response.body) != response.crc32:
        raise SessionLost("session.crc32: a message of the cache service was damaged on its way")
    try:
        return cache_pb2.ManagerMessage.FromString(response.body)
    except DecodeError as error:
        raise SessionLost(f"session.body: {error}") from error


def pack_u64(values: Iterable[int]) -> bytes:
    numbers = tuple(values)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_u64(field: str, packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{_count(field, packed, 8)}Q", packed)


def _unpack_u32(field: str, packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{_count(field, packed, 4)}I", packed)


def _count(field: str, packed: bytes, size: int) -> int:
    if len(packed) % size:
        raise SessionLost(f"{field}: length {len(packed)} is no multiple of {size}")
    return len(packed) // size


def encode_namespace(namespace: Namespace) -> types_pb2.Namespace:
    return types_pb2.Namespace(model=namespace.model, adapter=namespace.adapter, salt=namespace.salt)


def encode_group(spec: GroupSpec) -> types_pb2.GroupSpec:
    return types_pb2.GroupSpec(
        name=spec.name,
        kind=types_pb2.GroupKind.ValueType(int(spec.kind)),
        window_tokens=spec.window_tokens,
        num_pages=spec.num_pages,
        page_bytes=spec.page_bytes,
    )


def encode_step(step: Step) -> cache_pb2.WorkerMessage:
    # Decoding alone makes a BadItem: a step that is sent has none.
    message = cache_pb2.Step(
        step_id=step.step_id,
        acks=[_encode_ack(ack) for ack in step.acks],
        publishes=[_encode_publish(publish) for publish in cast(tuple[Publish, ...], step.publishes)],
        releases=[_encode_release(release) for release in cast(tuple[Release, ...], step.releases)],
        adopts=[_encode_adopt(adopt) for adopt in cast(tuple[Adopt, ...], step.adopts)],
        acquires=[_encode_acquire(acquire) for acquire in cast(tuple[Acquire, ...], step.acquires)],
    )
    if step.extends:
        message.extends.CopyFrom(_encode_extends(step.extends))
    if step.rates is not None:
        message.rates.prefill_tokens_per_s = step.rates.prefill_tokens_per_s
        message.rates.fetch_bytes_per_s = step.rates.fetch_bytes_per_s
    return cache_pb2.WorkerMessage(step=message)


def _encode_ack(ack: Ack) -> cache_pb2.Ack:
    return cache_pb2.Ack(
        ticket=ack.ticket,
        num_done=ack.num_done,
        status=cache_pb2.TransferStatus.ValueType(int(ack.status)),
        num_bytes=ack.num_bytes,
        seconds=ack.seconds,
    )


def _encode_publish(publish: Publish) -> cache_pb2.Publish:
    return cache_pb2.Publish(
        sequence_id=publish.sequence_id, tokens=publish.tokens, computed_tokens=publish.computed_tokens
    )


def _encode_release(release: Release) -> cache_pb2.Release:
    return cache_pb2.Release(
        sequence_id=release.sequence_id,
        reason=cache_pb2.ReleaseReason.ValueType(int(release.reason)),
        rolling_tokens=release.rolling_tokens,
    )


def _encode_extends(extends: tuple[Extend, ...]) -> cache_pb2.Extends:
    return cache_pb2.Extends(
        sequence_ids=pack_u64(extend.sequence_id for extend in extends),
        num_tokens=struct.pack(f"<{len(extends)}I", *(extend.num_tokens for extend in extends)),
    )


def _encode_acquire(acquire: Acquire) -> cache_pb2.Acquire:
    return cache_pb2.Acquire(
        sequence_id=acquire.sequence_id,
        namespace=encode_namespace(acquire.namespace),
        tokens=acquire.tokens,
        reserve_pages=acquire.reserve_pages,
        chunk_tokens=acquire.chunk_tokens,
        priority=acquire.priority,
        kept_tokens=acquire.kept_tokens,
        bypass_cache=acquire.bypass_cache,
    )


def _encode_adopt(adopt: Adopt) -> cache_pb2.Adopt:
    return cache_pb2.Adopt(
        sequence_id=adopt.sequence_id,
        namespace=encode_namespace(adopt.namespace),
        tokens=adopt.tokens,
        computed_tokens=adopt.computed_tokens,
        tables=[_encode_pages(pages) for pages in adopt.tables],
        working=[_encode_slot(slot) for slot in adopt.working],
        rolling=[_encode_slot(slot) for slot in adopt.rolling],
        priority=adopt.priority,
        bypass_cache=adopt.bypass_cache,
    )


def _encode_pages(pages: GroupPages) -> types_pb2.GroupPages:
    return types_pb2.GroupPages(group=pages.group, first_page=pages.first_page, page_ids=pages.page_ids)


def _encode_slot(slot: SnapshotSlot) -> types_pb2.SnapshotSlot:
    return types_pb2.SnapshotSlot(group=slot.group, boundary_tokens=slot.boundary_tokens, slot=slot.slot)


def decode_welcome(message: cache_pb2.Welcome) -> Welcome:
    limits = SessionLimits(*(getattr(message.limits, field) for field in SessionLimits._fields))
    for field in SessionLimits._fields:
        if not getattr(limits, field) and field not in MAY_BE_ZERO:
            raise SessionLost(f"welcome.limits.{field}: must be at least 1")
    if not message.generation:
        raise SessionLost("welcome.generation: must be at least 1")
    return Welcome(message.epoch, message.generation, message.last_step_id, limits, tuple(message.capabilities))


def decode_reply(message: cache_pb2.StepReply, num_groups: int) -> StepReply:
    return StepReply(
        step_id=message.step_id,
        grants=tuple(decode_grant(grant) for grant in message.grants),
        extends=_decode_extends(message.extends, num_groups),
        refusals=tuple(decode_refusal(refusal) for refusal in message.refusals),
        remaps=tuple(
            Remap(SequenceId(remap.sequence_id), tuple(_decode_pages(pages) for pages in remap.pages))
            for remap in message.remaps
        ),
    )


def decode_grant(message: types_pb2.Grant) -> Grant:
    match = message.match
    return Grant(
        sequence_id=SequenceId(message.sequence_id),
        usable_tokens=message.usable_tokens,
        cached_tokens=message.cached_tokens,
        fetched_tokens=message.fetched_tokens,
        tables=tuple(_decode_pages(pages) for pages in message.tables),
        match=Match(
            match.matched_tokens,
            match.usable_tokens,
            match.host_tokens,
            match.limiting_group,
            _MISS_REASONS.get(match.miss_reason, MissReason.UNSPECIFIED),
        ),
        fetches=tuple(decode_transfer("grant.fetches", fetch) for fetch in message.fetches),
        restore=tuple(_decode_slot(slot) for slot in message.restore),
        leave=tuple(_decode_slot(slot) for slot in message.leave),
        working=tuple(_decode_slot(slot) for slot in message.working),
        rolling=tuple(_decode_slot(slot) for slot in message.rolling),
    )


def decode_refusal(message: types_pb2.Refusal) -> Refusal:
    try:
        reason = RefusalReason(int(message.reason))
    except ValueError as error:
        raise SessionLost(f"refusal.reason: {message.reason} is unknown") from error
    return Refusal(SequenceId(message.sequence_id), reason, message.detail, message.field)


def _decode_pages(message: types_pb2.GroupPages) -> GroupPages:
    _count("page_ids", message.page_ids, 4)
    return GroupPages(message.group, message.first_page, message.page_ids)


def _decode_slot(message: types_pb2.SnapshotSlot) -> SnapshotSlot:
    return SnapshotSlot(message.group, message.boundary_tokens, PageId(message.slot))


def decode_transfer(field: str, message: types_pb2.Transfer) -> Transfer:
    groups = []
    for group in message.groups:
        num_ids = _count(f"{field}.page_ids", group.page_ids, 4)
        num_hashes = _count(f"{field}.page_hashes", group.page_hashes, 32)
        if num_ids != message.num_pages or num_hashes != message.num_pages:
            raise SessionLost(f"{field}.groups: needs one page id and one hash for each of {message.num_pages} pages")
        groups.append(TransferPages(group.group, group.page_ids, group.key_prefix, group.page_hashes))
    return Transfer(TicketId(message.ticket), tuple(groups), message.first_page, message.num_pages)


def _decode_extends(message: cache_pb2.ExtendGrants, num_groups: int) -> tuple[ExtendGrant, ...]:
    sequence_ids = unpack_u64("extends.sequence_ids", message.sequence_ids)
    if not sequence_ids:
        return ()
    firsts = _unpack_u32("extends.first_pages", message.first_pages)
    counts = _unpack_u32("extends.num_pages", message.num_pages)
    if not len(firsts) == len(counts) == len(sequence_ids) * num_groups:
        raise SessionLost("extends: first_pages and num_pages need one number per sequence and group")
    if len(message.page_ids) != 4 * sum(counts):
        raise SessionLost("extends.page_ids: does not hold as many ids as num_pages says")
    snapshots = {item.sequence_id: tuple(map(_decode_slot, item.leave)) for item in message.snapshots}
    grants, at, cell = [], 0, 0
    for sequence_id in sequence_ids:
        pages = []
        for group in range(num_groups):
            end = at + 4 * counts[cell]
            if end > at:
                pages.append(GroupPages(group, firsts[cell], message.page_ids[at:end]))
            at, cell = end, cell + 1
        grants.append(ExtendGrant(SequenceId(sequence_id), tuple(pages), snapshots.get(sequence_id, ())))
    return tuple(grants)


def page_ids(packed: bytes) -> array[int]:
    """Packed ids as numbers; the wire is little-endian, as is every platform that torch runs on."""
    ids = array("I")
    ids.frombytes(packed)
    return ids
