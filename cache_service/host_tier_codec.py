"""The messages of HostTier: what engines ask is decoded and checked by field, what the manager says is encoded."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cache_service.core.attachments.messages import (
    MAX_PATH_PAGES,
    Attach,
    Attached,
    AttachmentId,
    Commit,
    Committed,
    ExplainedPath,
    Found,
    GroupRange,
    LeaseEnd,
    Lookup,
    Path,
    Reserve,
    Reserved,
    TierPages,
    WrittenPages,
)
from cache_service.core.base.fetch_estimate import FetchRates
from cache_service.core.base.types import AttachmentExplanation
from protos.v1 import cache_pb2, host_tier_pb2
from session.errors import InvalidInput
from session.hello_check import check_groups
from session.limits import MAX_GROUPS, MAX_PAGE_TOKENS, MAX_PAGES, MAX_RANKS, SessionLimits
from session.wire import fields
from session.wire.parts import as_fields, decode_namespace
from session.words import HASH_BYTES, TOKEN_BYTES, GroupKind, GroupSpec, TransferStatus

PROTOCOL_VERSION = 1
FINGERPRINT_BYTES = 32
# A page of one group on one rank: 64 GiB, so that sums of all pages of a path fit into 64 bits.
MAX_PAGE_BYTES = 1 << 36
# Ranges of one Reserve, ends of one Release.
MAX_ITEMS = 8_192

_Call = (
    host_tier_pb2.LookupRequest
    | host_tier_pb2.ReserveRequest
    | host_tier_pb2.CommitRequest
    | host_tier_pb2.ReleaseRequest
)


def decode_attach(message: host_tier_pb2.AttachRequest, peer: str) -> Attach:
    """Raises InvalidInput. A field that is unknown here may be part of an identity, and is refused."""
    if message.protocol_version != PROTOCOL_VERSION:
        reason = f"is {message.protocol_version}; this service speaks {PROTOCOL_VERSION}"
        raise InvalidInput("attach.protocol_version", reason)
    fields.nothing_unknown(message, "attach")
    if len(message.fingerprint) != FINGERPRINT_BYTES:
        reason = f"has {len(message.fingerprint)} bytes; must be {FINGERPRINT_BYTES}"
        raise InvalidInput("attach.fingerprint", reason)
    fields.in_range(len(message.groups), "attach.groups", 1, MAX_GROUPS)
    groups = tuple([_group(group, f"attach.groups[{i}]") for i, group in enumerate(message.groups)])
    page_tokens = fields.in_range(message.page_tokens, "attach.page_tokens", 1, MAX_PAGE_TOKENS)
    check_groups(groups, page_tokens, "attach.groups")
    return Attach(
        engine=fields.text(message.engine, "attach.engine", required=True),
        fingerprint=message.fingerprint,
        model=fields.text(message.model, "attach.model", required=True),
        page_tokens=page_tokens,
        groups=groups,
        num_ranks=fields.in_range(message.num_ranks, "attach.num_ranks", 1, MAX_RANKS),
        host_tier_id=fields.text(message.host_tier_id, "attach.host_tier_id", required=True),
        peer=peer,
    )


def _group(message: host_tier_pb2.TierGroup, field: str) -> GroupSpec:
    fields.nothing_unknown(message, field)
    return GroupSpec(
        name=fields.text(message.name, f"{field}.name"),
        kind=fields.member(GroupKind, message.kind, f"{field}.kind"),
        num_pages=MAX_PAGES,
        page_bytes=fields.in_range(message.page_bytes, f"{field}.page_bytes", 1, MAX_PAGE_BYTES),
        window_tokens=message.window_tokens,
        replicated=message.replicated,
    )


def decode_id(message: _Call, call: str) -> AttachmentId:
    """Returns which attachment calls. Raises InvalidInput."""
    return AttachmentId(fields.text(message.epoch, f"{call}.epoch", required=True), message.attachment)


def _path(message: host_tier_pb2.TierPath, call: str, page_tokens: int) -> Path:
    field = f"{call}.path"
    fields.nothing_unknown(message, field)
    if message.page_ids and message.tokens:
        raise InvalidInput(field, "has page_ids and tokens; one of them")
    fields.at_most(
        fields.packed(message.page_ids, f"{field}.page_ids", HASH_BYTES), f"{field}.page_ids", MAX_PATH_PAGES
    )
    num_tokens = fields.packed(message.tokens, f"{field}.tokens", TOKEN_BYTES)
    fields.at_most(num_tokens // page_tokens, f"{field}.tokens", MAX_PATH_PAGES)
    adapter, salt = fields.text(message.adapter, f"{field}.adapter"), fields.text(message.salt, f"{field}.salt")
    return Path(adapter, salt, message.page_ids, message.tokens)


def decode_lookup(message: host_tier_pb2.LookupRequest, page_tokens: int) -> Lookup:
    """Raises InvalidInput, TooMany."""
    rates = FetchRates(
        fields.amount(message.compute_tokens_per_s, "lookup.compute_tokens_per_s"),
        fields.amount(message.fetch_bytes_per_s, "lookup.fetch_bytes_per_s"),
    )
    return Lookup(_path(message.path, "lookup", page_tokens), message.local_pages, message.lease, rates)


def decode_reserve(message: host_tier_pb2.ReserveRequest, page_tokens: int) -> Reserve:
    """Raises InvalidInput, TooMany."""
    fields.at_most(len(message.ranges), "reserve.ranges", MAX_ITEMS)
    # Their sum bounds the work, also where ranges overlap.
    fields.at_most(sum(one.num_pages for one in message.ranges), "reserve.ranges", MAX_GROUPS * MAX_PATH_PAGES)
    ranges = tuple([GroupRange(one.group, one.first_page, one.num_pages) for one in message.ranges])
    return Reserve(_path(message.path, "reserve", page_tokens), ranges)


def decode_commit(message: host_tier_pb2.CommitRequest) -> Commit:
    """Raises InvalidInput, TooMany."""
    fields.at_most(len(message.written), "commit.written", MAX_GROUPS)
    written = tuple([WrittenPages(one.group, one.num_pages, one.num_bytes) for one in message.written])
    status = fields.member(TransferStatus, message.status, "commit.status")
    return Commit(message.ticket, message.rank, status, written)


def decode_ends(message: host_tier_pb2.ReleaseRequest) -> list[LeaseEnd]:
    """Raises InvalidInput, TooMany."""
    fields.at_most(len(message.ends), "release.ends", MAX_ITEMS)
    ends = enumerate(message.ends)
    return [
        LeaseEnd(one.lease, fields.member(TransferStatus, one.status, f"release.ends[{i}].status"), one.num_pages)
        for i, one in ends
    ]


def is_about_engines(message: cache_pb2.ExplainRequest) -> bool:
    """Returns whether attached engines are asked, and not workers."""
    return bool(message.page_ids or message.attachment)


def decode_explain(message: cache_pb2.ExplainRequest, limits: SessionLimits) -> ExplainedPath:
    """Raises InvalidInput, TooMany."""
    if message.page_ids and message.tokens:
        raise InvalidInput("request.page_ids", "are set beside tokens; one of them")
    if message.worker_id:
        raise InvalidInput("request.worker_id", "is set beside page_ids or attachment, which are of attached engines")
    num_ids = fields.packed(message.page_ids, "request.page_ids", HASH_BYTES)
    fields.at_most(num_ids, "request.page_ids", MAX_PATH_PAGES)
    tokens = fields.tokens(message.tokens, "request.tokens", limits.max_sequence_tokens)
    if not (message.attachment or message.HasField("namespace")):
        raise InvalidInput("request.namespace", "must be set, or attachment")
    model, adapter, salt = decode_namespace(message.namespace, "request.namespace", needs_model=not message.attachment)
    if not (message.page_ids or tokens):
        if message.HasField("namespace"):
            raise InvalidInput("request.namespace", "is set without page_ids or tokens; a Lookup has its own")
        return ExplainedPath(message.attachment, model, None)
    return ExplainedPath(message.attachment, model, Path(adapter, salt, message.page_ids, tokens))


def encode_explain(values: Sequence[AttachmentExplanation]) -> cache_pb2.ExplainResponse:
    return cache_pb2.ExplainResponse(attachments=[as_fields(value) for value in values])


def encode_attached(value: Attached) -> host_tier_pb2.AttachResponse:
    return host_tier_pb2.AttachResponse(**as_fields(value))


def encode_found(value: Found) -> host_tier_pb2.LookupResponse:
    return host_tier_pb2.LookupResponse(**{**value._asdict(), "pages": _pages(value.pages)})


def encode_reserved(value: Reserved) -> host_tier_pb2.ReserveResponse:
    return host_tier_pb2.ReserveResponse(**{**value._asdict(), "pages": _pages(value.pages)})


def encode_committed(value: Committed) -> host_tier_pb2.CommitResponse:
    return host_tier_pb2.CommitResponse(**value._asdict())


def _pages(values: Sequence[TierPages]) -> list[host_tier_pb2.TierPages]:
    return [
        host_tier_pb2.TierPages(
            group=one.group,
            key_prefix=one.key_prefix,
            pages=struct.pack(f"<{len(one.pages)}I", *one.pages),
            page_hashes=b"".join(one.page_hashes),
        )
        for one in values
    ]
