"""Messages of peers -> the core's words, checked field by field.

Knows no manager and no connection. What it lets pass is well-formed; whether it makes sense now is the core's to say.
"""

from __future__ import annotations

import struct

from cache_service.codec import fields
from cache_service.codec.fields import Limits
from cache_service.core.errors import InvalidInput
from cache_service.core.types import (
    Ack,
    Acquire,
    Adopt,
    Extend,
    GroupKind,
    GroupPages,
    GroupSpec,
    Hello,
    HostTierKind,
    Namespace,
    PageId,
    Publish,
    Rates,
    Release,
    ReleaseReason,
    SequenceId,
    SnapshotSlot,
    Step,
    TicketId,
    TransferStatus,
    WorkerId,
)
from protos.v1 import cache_pb2, types_pb2

PROTOCOL_VERSION = 1
FINGERPRINT_BYTES = 32
MAX_RANKS = 1_024
LENGTH_BYTES = 4


def hello(message: cache_pb2.Hello, limits: Limits) -> Hello:
    if message.protocol_version != PROTOCOL_VERSION:
        reason = f"is {message.protocol_version}; this service speaks {PROTOCOL_VERSION}"
        raise InvalidInput("hello.protocol_version", reason)
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
        page_tokens=fields.in_range(message.page_tokens, "hello.page_tokens", 1, fields.MAX_PAGE_TOKENS),
        groups=_group_specs(message),
        live_sequences=fields.sequence_ids(message.live_sequences, "hello.live_sequences", limits.max_live_sequences),
        host_tier=tier,
        host_tier_id=tier_id,
        num_ranks=fields.in_range(message.num_ranks, "hello.num_ranks", 1, MAX_RANKS),
    )


def _group_specs(message: cache_pb2.Hello) -> tuple[GroupSpec, ...]:
    fields.in_range(len(message.groups), "hello.groups", 1, fields.MAX_GROUPS)
    specs = tuple(_group_spec(group, f"hello.groups[{i}]") for i, group in enumerate(message.groups))
    fields.unique((spec.name for spec in specs), "hello.groups")
    return specs


def _group_spec(message: types_pb2.GroupSpec, field: str) -> GroupSpec:
    kind = fields.member(GroupKind, message.kind, f"{field}.kind")
    if (kind is GroupKind.WINDOW) != (message.window_tokens > 0):
        raise InvalidInput(f"{field}.window_tokens", "must be set for a WINDOW group, and for no other")
    return GroupSpec(
        name=fields.text(message.name, f"{field}.name", required=True),
        kind=kind,
        num_pages=fields.in_range(message.num_pages, f"{field}.num_pages", 1, fields.MAX_PAGES),
        page_bytes=message.page_bytes,
        window_tokens=message.window_tokens,
    )


def step(message: cache_pb2.Step, limits: Limits) -> Step:
    if not message.step_id:
        raise InvalidInput("step.step_id", "must be at least 1")
    for name in ("acks", "publishes", "releases", "acquires"):
        fields.at_most(getattr(message, name), f"step.{name}", limits.max_items)
    return Step(
        message.step_id,
        tuple([_ack(ack, f"step.acks[{i}]") for i, ack in enumerate(message.acks)]),
        tuple([_publish(item, f"step.publishes[{i}]", limits) for i, item in enumerate(message.publishes)]),
        tuple([_release(item, f"step.releases[{i}]") for i, item in enumerate(message.releases)]),
        _extends(message.extends, limits) if message.HasField("extends") else (),
        tuple([_acquire(item, f"step.acquires[{i}]", limits) for i, item in enumerate(message.acquires)]),
        _rates(message.rates) if message.HasField("rates") else None,
    )


def _ack(message: cache_pb2.Ack, field: str) -> Ack:
    return Ack(
        TicketId(message.ticket),
        message.num_done,
        fields.member(TransferStatus, message.status, f"{field}.status"),
        message.num_bytes,
        fields.amount(message.seconds, f"{field}.seconds"),
    )


def _publish(message: cache_pb2.Publish, field: str, limits: Limits) -> Publish:
    new_tokens = fields.tokens(message.tokens, f"{field}.tokens", limits.max_prompt_tokens)
    return Publish(SequenceId(message.sequence_id), new_tokens, message.computed_tokens)


def _release(message: cache_pb2.Release, field: str) -> Release:
    reason = fields.member(ReleaseReason, message.reason, f"{field}.reason")
    return Release(SequenceId(message.sequence_id), reason)


def _extends(message: cache_pb2.Extends, limits: Limits) -> tuple[Extend, ...]:
    ids = fields.sequence_ids(message.sequence_ids, "step.extends.sequence_ids", limits.max_live_sequences)
    count = fields.packed(message.num_tokens, "step.extends.num_tokens", LENGTH_BYTES)
    if count != len(ids):
        raise InvalidInput("step.extends.num_tokens", f"has {count} items for {len(ids)} sequence ids")
    return tuple(map(Extend, ids, struct.unpack(f"<{count}I", message.num_tokens)))


def _acquire(message: cache_pb2.Acquire, field: str, limits: Limits) -> Acquire:
    return Acquire(
        SequenceId(message.sequence_id),
        _required_namespace(message, field),
        fields.tokens(message.tokens, f"{field}.tokens", limits.max_prompt_tokens, required=True),
        message.reserve_pages,
        message.chunk_tokens,
        message.priority,
    )


def _rates(message: cache_pb2.Rates) -> Rates:
    return Rates(
        fields.amount(message.prefill_tokens_per_s, "step.rates.prefill_tokens_per_s"),
        fields.amount(message.fetch_bytes_per_s, "step.rates.fetch_bytes_per_s"),
    )


def adopt(message: cache_pb2.Adopt, limits: Limits) -> Adopt:
    for name in ("tables", "working", "rolling"):
        fields.at_most(getattr(message, name), f"adopt.{name}", fields.MAX_GROUPS)
    tables = tuple(_pages(pages, f"adopt.tables[{i}]", limits) for i, pages in enumerate(message.tables))
    fields.unique((pages.group for pages in tables), "adopt.tables")
    return Adopt(
        sequence_id=SequenceId(message.sequence_id),
        namespace=_required_namespace(message, "adopt"),
        tokens=fields.tokens(message.tokens, "adopt.tokens", limits.max_prompt_tokens, required=True),
        computed_tokens=message.computed_tokens,
        tables=tables,
        working=tuple(_slot(slot, f"adopt.working[{i}]") for i, slot in enumerate(message.working)),
        rolling=tuple(_slot(slot, f"adopt.rolling[{i}]") for i, slot in enumerate(message.rolling)),
        priority=message.priority,
    )


def _pages(message: types_pb2.GroupPages, field: str, limits: Limits) -> GroupPages:
    group = fields.in_range(message.group, f"{field}.group", 0, fields.MAX_GROUPS - 1)
    ids = fields.page_ids(message.page_ids, f"{field}.page_ids", limits.max_prompt_tokens)
    return GroupPages(group, message.first_page, ids)


def _slot(message: types_pb2.SnapshotSlot, field: str) -> SnapshotSlot:
    group = fields.in_range(message.group, f"{field}.group", 0, fields.MAX_GROUPS - 1)
    return SnapshotSlot(group, message.boundary_tokens, PageId(message.slot))


def namespace(message: types_pb2.Namespace, field: str) -> Namespace:
    return Namespace(
        fields.text(message.model, f"{field}.model", required=True),
        fields.text(message.adapter, f"{field}.adapter"),
        fields.text(message.salt, f"{field}.salt"),
    )


_Named = cache_pb2.Acquire | cache_pb2.Adopt | cache_pb2.MatchRequest | cache_pb2.ExplainRequest | cache_pb2.PinRequest


def _required_namespace(message: _Named, field: str) -> Namespace:
    if not message.HasField("namespace"):
        raise InvalidInput(f"{field}.namespace", "must be set")
    return namespace(message.namespace, f"{field}.namespace")


def prompt(
    message: cache_pb2.MatchRequest | cache_pb2.ExplainRequest | cache_pb2.PinRequest, limits: Limits
) -> tuple[Namespace, bytes]:
    """The namespace and the tokens that every question about a prompt carries."""
    named = _required_namespace(message, "request")
    return named, fields.tokens(message.tokens, "request.tokens", limits.max_prompt_tokens, required=True)


def worker_id(message: cache_pb2.MatchRequest | cache_pb2.ExplainRequest) -> WorkerId | None:
    """None when every worker is meant."""
    return WorkerId(fields.text(message.worker_id, "request.worker_id")) or None


def ttl_ms(message: cache_pb2.PinRequest, most: int) -> int:
    return fields.in_range(message.ttl_ms, "request.ttl_ms", 0, most)


def scope(message: cache_pb2.ClearRequest) -> Namespace | None:
    """None when every namespace is meant."""
    return namespace(message.namespace, "request.namespace") if message.HasField("namespace") else None
