"""Unary calls and events: what people ask is decoded and checked, what the manager says is encoded as it is.

The session's messages are in session.wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from cache_service.core.base.stats import (
    AttachmentStats,
    ClearResult,
    GroupStats,
    HostTierStats,
    ManagerStats,
    WorkerStats,
)
from cache_service.core.base.types import Age, Connection, Event, Explanation, Removed, Segment, Stored, WorkerMatch
from protos.v1 import cache_pb2, types_pb2
from rpc.version import package_version
from session.limits import SessionLimits
from session.wire import fields
from session.wire.parts import decode_namespace, encode_match, encode_namespace, required_namespace
from session.words import Match, Namespace, WorkerId

# A length-delimited field, in front of each worker.
_WORKERS_TAG = bytes([cache_pb2.MatchResponse.WORKERS_FIELD_NUMBER << 3 | 2])


def decode_prompt(
    message: cache_pb2.MatchRequest | cache_pb2.ExplainRequest | cache_pb2.PinRequest, limits: SessionLimits
) -> tuple[Namespace, bytes]:
    """Returns the namespace and the tokens that every question about a prompt carries."""
    named = required_namespace(message, "request.namespace")
    return named, fields.tokens(message.tokens, "request.tokens", limits.max_sequence_tokens, required=True)


def decode_worker_id(message: cache_pb2.MatchRequest | cache_pb2.ExplainRequest) -> WorkerId | None:
    """None when every worker is meant."""
    return WorkerId(fields.text(message.worker_id, "request.worker_id")) or None


def decode_ttl_ms(message: cache_pb2.PinRequest, most: int) -> int:
    return fields.in_range(message.ttl_ms, "request.ttl_ms", 0, most)


def decode_scope(message: cache_pb2.ClearRequest) -> Namespace | None:
    """None when every namespace is meant."""
    return decode_namespace(message.namespace, "request.namespace") if message.HasField("namespace") else None


def encode_match_response(values: Iterable[WorkerMatch]) -> bytes:
    """Returns a serialized MatchResponse.

    Joined from parts that are encoded once: bytes of a message's fields, one after the other, are that message's bytes.
    64 workers take 19 us so; messages that are filled and then serialized take 57.
    """
    parts: list[bytes] = []
    for worker_id, endpoint, match in values:
        name, found = _encode_worker(worker_id, endpoint), _encode_match(match)
        parts += (_WORKERS_TAG, _varint(len(name) + len(found)), name, found)
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _encode_worker(worker_id: WorkerId, endpoint: str) -> bytes:
    return cache_pb2.WorkerMatch(worker_id=worker_id, endpoint=endpoint).SerializeToString()


@lru_cache(maxsize=4096)
def _encode_match(value: Match) -> bytes:
    return cache_pb2.WorkerMatch(match=encode_match(value)).SerializeToString()


@lru_cache(maxsize=1024)
def _varint(number: int) -> bytes:
    """Returns a length as protobuf writes it: seven bits a byte, the lowest first."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def encode_explain_response(values: Iterable[Explanation]) -> cache_pb2.ExplainResponse:
    return cache_pb2.ExplainResponse(workers=[_explanation(value) for value in values])


def _explanation(value: Explanation) -> cache_pb2.WorkerExplanation:
    return cache_pb2.WorkerExplanation(
        worker_id=value.worker_id,
        endpoint=value.endpoint,
        match=encode_match(value.match),
        segments=[_segment(segment) for segment in value.segments],
        notes=value.notes,
        pinned_tokens=value.pinned_tokens,
        pin_left_ms=value.pin_left_ms,
        holders=[cache_pb2.Holder(sequence_id=one.sequence_id, num_tokens=one.num_tokens) for one in value.holders],
        num_holders=value.num_holders,
        spilling_tokens=value.spilling_tokens,
    )


def _segment(value: Segment) -> cache_pb2.Segment:
    return cache_pb2.Segment(
        first_token=value.first_token,
        num_tokens=value.num_tokens,
        residence=cache_pb2.Residence.ValueType(value.residence),
        miss_reason=types_pb2.MissReason.ValueType(value.miss_reason),
        last_used=_age(value.last_used),
        gone=_age(value.gone),
    )


def _age(value: Age | None) -> cache_pb2.Age | None:
    return None if value is None else cache_pb2.Age(least_ms=value.least_ms, most_ms=value.most_ms)


def encode_event(value: Event, epoch: str, seq: int) -> cache_pb2.WatchResponse:
    if isinstance(value, Stored):
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, stored=_stored(value))
    if isinstance(value, Removed):
        removed = cache_pb2.PagesRemoved(worker_id=value.worker_id, group=value.group, page_hashes=value.page_hashes)
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, removed=removed)
    if isinstance(value, Connection):
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, connection=_connection(value))
    cleared = cache_pb2.CacheCleared(worker_id=value.worker_id or "")
    return cache_pb2.WatchResponse(epoch=epoch, seq=seq, cleared=cleared)


def _connection(value: Connection) -> cache_pb2.WorkerConnection:
    return cache_pb2.WorkerConnection(
        worker_id=value.worker_id, endpoint=value.endpoint, is_connected=value.is_connected
    )


def encode_present_state_end(num_pages: int, epoch: str, seq: int) -> cache_pb2.WatchResponse:
    end = cache_pb2.PresentStateEnd(num_pages=num_pages)
    return cache_pb2.WatchResponse(epoch=epoch, seq=seq, present_state_end=end)


def _stored(value: Stored) -> cache_pb2.PagesStored:
    return cache_pb2.PagesStored(
        worker_id=value.worker_id,
        group=value.group,
        parent_hash=value.parent_hash,
        page_hashes=value.page_hashes,
        tokens=value.tokens,
        namespace=encode_namespace(value.namespace),
    )


def encode_events_lost(num_events: int, epoch: str, seq: int) -> cache_pb2.WatchResponse:
    return cache_pb2.WatchResponse(epoch=epoch, seq=seq, lost=cache_pb2.EventsLost(num_events=num_events))


def encode_clear_response(value: ClearResult) -> cache_pb2.ClearResponse:
    return cache_pb2.ClearResponse(
        num_pages=value.num_pages,
        num_host_rows=value.num_host_rows,
        num_pinned_pages=value.num_pinned_pages,
        num_unconfirmed_workers=value.num_unconfirmed_workers,
    )


def encode_stats_response(value: ManagerStats) -> cache_pb2.StatsResponse:
    return cache_pb2.StatsResponse(
        epoch=value.epoch,
        workers=[_worker_stats(worker) for worker in value.workers],
        host_tier=_host_tier_stats(value.host_tier),
        policy=value.policy,
        version=package_version(),
        attachments=_attachment_stats(value.attachments),
    )


def _worker_stats(value: WorkerStats) -> cache_pb2.WorkerStats:
    return cache_pb2.WorkerStats(
        worker_id=value.worker_id,
        endpoint=value.endpoint,
        incarnation=value.incarnation,
        connected=value.connected,
        groups=[_group_stats(group) for group in value.groups],
        num_leases=value.num_leases,
        num_tickets=value.num_tickets,
        num_requests=value.num_requests,
        prompt_tokens=value.prompt_tokens,
        cached_tokens=value.cached_tokens,
        fetched_tokens=value.fetched_tokens,
        computed_tokens=value.computed_tokens,
        num_refusals=value.num_refusals,
        num_nodes=value.num_nodes,
        num_ghost_pages=value.num_ghost_pages,
        kept_bytes=value.kept_bytes,
        model=value.model,
        pinned_tokens=value.pinned_tokens,
        matched_tokens=value.matched_tokens,
        restored_pages=value.restored_pages,
        restored_tokens=value.restored_tokens,
        rates=cache_pb2.Rates(**value.rates._asdict()),
        declined_tokens=value.declined_tokens,
        misses={reason.name.lower(): count for reason, count in value.misses},
    )


def _group_stats(value: GroupStats) -> cache_pb2.GroupStats:
    return cache_pb2.GroupStats(
        name=value.name,
        kind=types_pb2.GroupKind.ValueType(value.kind),
        num_pages=value.num_pages,
        num_free=value.num_free,
        num_evictable=value.num_evictable,
        num_evicted=value.num_evicted,
        num_snapshots_taken=value.num_snapshots_taken,
        num_snapshots_restored=value.num_snapshots_restored,
        limited_tokens=value.limited_tokens,
    )


def _host_tier_stats(value: HostTierStats) -> cache_pb2.HostTierStats:
    return cache_pb2.HostTierStats(
        num_rows=value.num_rows,
        num_bytes=value.num_bytes,
        quota_bytes=value.quota_bytes,
        num_spilled_pages=value.num_spilled_pages,
        num_fetched_pages=value.num_fetched_pages,
        num_missing_pages=value.num_missing_pages,
        num_corrupt_pages=value.num_corrupt_pages,
        breaker_open=value.breaker_open,
        spill_policy=value.spill_policy.value,
        fetch_policy=value.fetch_policy.value,
    )


def _attachment_stats(value: AttachmentStats) -> cache_pb2.AttachmentStats:
    fields = value._asdict()
    misses = {reason.name.lower(): count for reason, count in fields.pop("misses")}
    return cache_pb2.AttachmentStats(**fields, misses=misses)
