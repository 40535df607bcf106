"""Messages of peers -> the core's words, checked field by field.

Knows no manager and no connection. What it lets pass is well-formed; whether it makes sense now is the core's to say.
An item of a Step that is malformed becomes a BadItem in its place, for the manager to refuse alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from cache_service.codec import fields
from cache_service.codec.version import CAPABILITIES, PROTOCOL_VERSION
from cache_service.core.base.limits import MAX_GROUPS, MAX_NAME_CHARS, MAX_PAGE_TOKENS, MAX_PAGES, MAX_RANKS
from protos.v1 import cache_pb2, types_pb2
from session.errors import FieldError, InvalidInput
from session.messages import Ack, Acquire, Adopt, BadItem, Extend, Hello, Publish, Rates, Release, SessionLimits, Step
from session.words import (
    TOKEN_BYTES,
    GroupKind,
    GroupPages,
    GroupSpec,
    HostTierKind,
    Namespace,
    PageId,
    ReleaseReason,
    SequenceId,
    SnapshotSlot,
    TicketId,
    TransferStatus,
    WorkerId,
)

FINGERPRINT_BYTES = 32
LENGTH_BYTES = 4

T = TypeVar("T")
M = TypeVar("M", cache_pb2.Publish, cache_pb2.Release, cache_pb2.Adopt, cache_pb2.Acquire)


def hello(message: cache_pb2.Hello) -> Hello:
    if message.protocol_version != PROTOCOL_VERSION:
        reason = f"is {message.protocol_version}; this service speaks {PROTOCOL_VERSION}"
        raise InvalidInput("hello.protocol_version", reason)
    fields.nothing_unknown(message, "hello")
    for i, name in enumerate(message.capabilities):
        if name not in CAPABILITIES:
            raise InvalidInput(f"hello.capabilities[{i}]", f"{name[:MAX_NAME_CHARS]!r} is none of this service's")
    if len(message.fingerprint) != FINGERPRINT_BYTES:
        reason = f"has {len(message.fingerprint)} bytes; must be {FINGERPRINT_BYTES}"
        raise InvalidInput("hello.fingerprint", reason)
    tier = fields.member(HostTierKind, message.host_tier, "hello.host_tier")
    tier_id = fields.text(message.host_tier_id, "hello.host_tier_id", required=tier is HostTierKind.SHARED)
    return Hello(
        worker_id=WorkerId(fields.text(message.worker_id, "hello.worker_id", required=True)),
        endpoint=fields.text(message.endpoint, "hello.endpoint"),
        incarnation=fields.text(message.incarnation, "hello.incarnation", required=True),
        fingerprint=message.fingerprint,
        page_tokens=fields.in_range(message.page_tokens, "hello.page_tokens", 1, MAX_PAGE_TOKENS),
        groups=_group_specs(message),
        host_tier=tier,
        host_tier_id=tier_id,
        num_ranks=fields.in_range(message.num_ranks, "hello.num_ranks", 1, MAX_RANKS),
        model=fields.text(message.model, "hello.model", required=True),
        generation=message.generation,
    )


def _group_specs(message: cache_pb2.Hello) -> tuple[GroupSpec, ...]:
    fields.in_range(len(message.groups), "hello.groups", 1, MAX_GROUPS)
    specs = tuple(_group_spec(group, f"hello.groups[{i}]") for i, group in enumerate(message.groups))
    fields.unique((spec.name for spec in specs), "hello.groups")
    return specs


def _group_spec(message: types_pb2.GroupSpec, field: str) -> GroupSpec:
    fields.nothing_unknown(message, field)
    kind = fields.member(GroupKind, message.kind, f"{field}.kind")
    if (kind is GroupKind.WINDOW) != (message.window_tokens > 0):
        raise InvalidInput(f"{field}.window_tokens", "must be set for a WINDOW group, and for no other")
    return GroupSpec(
        name=fields.text(message.name, f"{field}.name", required=True),
        kind=kind,
        num_pages=fields.in_range(message.num_pages, f"{field}.num_pages", 1, MAX_PAGES),
        page_bytes=message.page_bytes,
        window_tokens=message.window_tokens,
    )


def step(message: cache_pb2.Step, limits: SessionLimits) -> Step:
    """Raises for what belongs to no item; an item that is malformed becomes a BadItem in its place."""
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
    )


def _items(
    field: str, items: Sequence[M], most: int, decoded: Callable[[M, int], T], most_tokens: int
) -> tuple[T | BadItem, ...]:
    if not items:
        return ()
    fields.at_most(items, field, most)
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
    fields.at_most(acks, "step.acks", most)
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
        _required_namespace(message, "namespace"),
        fields.tokens(message.tokens, "tokens", most_tokens, required=not message.kept_tokens),
        message.reserve_pages,
        message.chunk_tokens,
        message.priority,
        message.kept_tokens,
        message.bypass_cache,
    )


def _adopt(message: cache_pb2.Adopt, most_tokens: int) -> Adopt:
    fields.nothing_unknown(message, "")
    for name in ("tables", "working", "rolling"):
        fields.at_most(getattr(message, name), name, MAX_GROUPS)
    tables = tuple(_pages(pages, f"tables[{i}]") for i, pages in enumerate(message.tables))
    fields.unique((pages.group for pages in tables), "tables")
    return Adopt(
        sequence_id=SequenceId(message.sequence_id),
        namespace=_required_namespace(message, "namespace"),
        tokens=fields.tokens(message.tokens, "tokens", most_tokens, required=True),
        computed_tokens=message.computed_tokens,
        tables=tables,
        working=tuple(_slot(slot, f"working[{i}]") for i, slot in enumerate(message.working)),
        rolling=tuple(_slot(slot, f"rolling[{i}]") for i, slot in enumerate(message.rolling)),
        priority=message.priority,
        bypass_cache=message.bypass_cache,
    )


def _pages(message: types_pb2.GroupPages, field: str) -> GroupPages:
    fields.nothing_unknown(message, field)
    group = fields.in_range(message.group, f"{field}.group", 0, MAX_GROUPS - 1)
    return GroupPages(group, message.first_page, fields.page_ids(message.page_ids, f"{field}.page_ids"))


def _slot(message: types_pb2.SnapshotSlot, field: str) -> SnapshotSlot:
    fields.nothing_unknown(message, field)
    group = fields.in_range(message.group, f"{field}.group", 0, MAX_GROUPS - 1)
    return SnapshotSlot(group, message.boundary_tokens, PageId(message.slot))


def _extends(message: cache_pb2.Extends, most: int) -> tuple[Extend, ...]:
    """Packed arrays that do not fit together belong to no item."""
    ids = fields.sequence_ids(message.sequence_ids, "step.extends.sequence_ids", most)
    packed = message.num_tokens
    if len(packed) != LENGTH_BYTES * len(ids):
        count = fields.packed(packed, "step.extends.num_tokens", LENGTH_BYTES)
        raise InvalidInput("step.extends.num_tokens", f"has {count} items for {len(ids)} sequence ids")
    return tuple(map(Extend, ids, struct.unpack(f"<{len(ids)}I", packed)))


def _rates(message: cache_pb2.Rates) -> Rates:
    return Rates(
        fields.amount(message.prefill_tokens_per_s, "step.rates.prefill_tokens_per_s"),
        fields.amount(message.fetch_bytes_per_s, "step.rates.fetch_bytes_per_s"),
    )


# Namespaces, and what unary calls ask.


def namespace(message: types_pb2.Namespace, field: str) -> Namespace:
    fields.nothing_unknown(message, field)
    return Namespace(
        fields.text(message.model, f"{field}.model", required=True),
        fields.text(message.adapter, f"{field}.adapter"),
        fields.text(message.salt, f"{field}.salt"),
    )


_Named = cache_pb2.Acquire | cache_pb2.Adopt | cache_pb2.MatchRequest | cache_pb2.ExplainRequest | cache_pb2.PinRequest


def _required_namespace(message: _Named, field: str) -> Namespace:
    if not message.HasField("namespace"):
        raise InvalidInput(field, "must be set")
    return namespace(message.namespace, field)


def prompt(
    message: cache_pb2.MatchRequest | cache_pb2.ExplainRequest | cache_pb2.PinRequest, limits: SessionLimits
) -> tuple[Namespace, bytes]:
    """The namespace and the tokens that every question about a prompt carries."""
    named = _required_namespace(message, "request.namespace")
    return named, fields.tokens(message.tokens, "request.tokens", limits.max_sequence_tokens, required=True)


def worker_id(message: cache_pb2.MatchRequest | cache_pb2.ExplainRequest) -> WorkerId | None:
    """None when every worker is meant."""
    return WorkerId(fields.text(message.worker_id, "request.worker_id")) or None


def ttl_ms(message: cache_pb2.PinRequest, most: int) -> int:
    return fields.in_range(message.ttl_ms, "request.ttl_ms", 0, most)


def scope(message: cache_pb2.ClearRequest) -> Namespace | None:
    """None when every namespace is meant."""
    return namespace(message.namespace, "request.namespace") if message.HasField("namespace") else None
