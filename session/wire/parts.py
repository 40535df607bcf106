"""Parts that several messages share: namespaces, groups, block tables, state slots, transfers, matches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from protos.v1 import cache_pb2, types_pb2
from session.errors import InvalidInput
from session.limits import MAX_SNAPSHOT_BOUNDARIES
from session.messages import Forget
from session.wire import fields
from session.words import (
    HASH_BYTES,
    PAGE_ID_BYTES,
    GroupKind,
    GroupPages,
    GroupSpec,
    Match,
    MissReason,
    Namespace,
    PageId,
    StateSlot,
    TicketId,
    Transfer,
    TransferPages,
)

_Named = (
    cache_pb2.Acquire
    | cache_pb2.Adopt
    | cache_pb2.CachedRun
    | cache_pb2.MatchRequest
    | cache_pb2.ExplainRequest
    | cache_pb2.PinRequest
)
_MISS_REASONS = {int(reason): reason for reason in MissReason}


def as_fields(value: Any) -> Any:
    """Returns a NamedTuple as fields of the message with the same names, nested ones likewise."""
    if isinstance(value, Enum):
        return value.value
    if not isinstance(value, tuple):
        return value
    if not hasattr(value, "_fields"):
        return [as_fields(item) for item in value]
    return {name: as_fields(item) for name, item in zip(value._fields, value, strict=True) if item is not None}


def encode_namespace(value: Namespace) -> types_pb2.Namespace:
    return types_pb2.Namespace(model=value.model, adapter=value.adapter, salt=value.salt)


def decode_namespace(message: types_pb2.Namespace, field: str, *, needs_model: bool = True) -> Namespace:
    fields.nothing_unknown(message, field)
    return Namespace(
        fields.text(message.model, f"{field}.model", required=needs_model),
        fields.text(message.adapter, f"{field}.adapter"),
        fields.text(message.salt, f"{field}.salt"),
    )


def required_namespace(message: _Named, field: str) -> Namespace:
    if not message.HasField("namespace"):
        raise InvalidInput(field, "must be set")
    return decode_namespace(message.namespace, field)


def encode_forget(value: Forget) -> cache_pb2.Forget:
    names = [encode_namespace(namespace) for namespace in value.namespaces]
    return cache_pb2.Forget(number=value.number, everything=value.everything, namespaces=names)


def decode_forget(message: cache_pb2.Forget, field: str) -> Forget:
    named = enumerate(message.namespaces)
    names = tuple([decode_namespace(name, f"{field}.namespaces[{i}]") for i, name in named])
    return Forget(message.number, message.everything, names)


def encode_group_spec(value: GroupSpec) -> types_pb2.GroupSpec:
    told = as_fields(value)
    del told["replicated"]  # of attached engines alone
    return types_pb2.GroupSpec(**told)


def decode_group_spec(message: types_pb2.GroupSpec, field: str) -> GroupSpec:
    fields.nothing_unknown(message, field)
    return GroupSpec(
        name=fields.text(message.name, f"{field}.name"),
        kind=fields.member(GroupKind, message.kind, f"{field}.kind"),
        num_pages=message.num_pages,
        page_bytes=message.page_bytes,
        window_tokens=message.window_tokens,
        state_interval_tokens=message.state_interval_tokens,
    )


def encode_pages(values: Iterable[GroupPages]) -> list[types_pb2.GroupPages]:
    return [types_pb2.GroupPages(group=v.group, first_page=v.first_page, page_ids=bytes(v.page_ids)) for v in values]


def decode_pages(message: types_pb2.GroupPages, field: str) -> GroupPages:
    page_ids = message.page_ids
    fields.packed(page_ids, f"{field}.page_ids", PAGE_ID_BYTES)
    return GroupPages(message.group, message.first_page, page_ids)


def encode_slots(values: Iterable[StateSlot]) -> list[types_pb2.SnapshotSlot]:
    return [types_pb2.SnapshotSlot(group=v.group, boundary_tokens=v.boundary_tokens, slot=v.slot) for v in values]


def decode_slot(message: types_pb2.SnapshotSlot) -> StateSlot:
    return StateSlot(message.group, message.boundary_tokens, PageId(message.slot))


def decode_boundaries(boundaries: Sequence[int], field: str) -> tuple[int, ...]:
    """Returns the boundaries, in tokens, at which a sequence is to leave snapshots."""
    fields.at_most(len(boundaries), field, MAX_SNAPSHOT_BOUNDARIES)
    return tuple(boundaries)


def fill_transfer(message: types_pb2.Transfer, value: Transfer) -> None:
    message.ticket = value.ticket
    message.first_page = value.first_page
    message.num_pages = value.num_pages
    for group, page_ids, key_prefix, page_hashes in value.groups:
        message.groups.add(group=group, page_ids=page_ids, key_prefix=key_prefix, page_hashes=page_hashes)


def decode_transfer(message: types_pb2.Transfer, field: str) -> Transfer:
    groups, num_pages = [], message.num_pages
    for group in message.groups:
        num_ids = fields.packed(group.page_ids, f"{field}.page_ids", PAGE_ID_BYTES)
        num_hashes = fields.packed(group.page_hashes, f"{field}.page_hashes", HASH_BYTES)
        if num_ids != num_pages or num_hashes != num_pages:
            raise InvalidInput(f"{field}.groups", f"needs one page id and one hash for each of {num_pages} pages")
        groups.append(TransferPages(group.group, group.page_ids, group.key_prefix, group.page_hashes))
    return Transfer(TicketId(message.ticket), tuple(groups), message.first_page, num_pages)


def encode_match(value: Match) -> types_pb2.MatchResult:
    return types_pb2.MatchResult(
        matched_tokens=value.matched_tokens,
        usable_tokens=value.usable_tokens,
        host_tokens=value.host_tokens,
        limiting_group=value.limiting_group,
        miss_reason=types_pb2.MissReason.ValueType(value.miss_reason),
    )


def decode_match(message: types_pb2.MatchResult) -> Match:
    return Match(
        message.matched_tokens,
        message.usable_tokens,
        message.host_tokens,
        message.limiting_group,
        _MISS_REASONS.get(message.miss_reason, MissReason.UNSPECIFIED),
    )
