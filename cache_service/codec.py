"""Messages of the unary calls (Match, Explain, Stats, Pin, Clear) and of Watch: requests decoded, replies encoded.

The session's messages are in session.wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from cache_service.core.base.stats import AttachedEngine, AttachmentStats, ClearResult, ManagerStats, WorkerStats
from cache_service.core.base.types import Connection, Event, Explanation, Removed, Stored, WorkerMatch
from protos.v1 import cache_pb2
from rpc.version import package_version
from session.limits import SessionLimits
from session.wire import fields
from session.wire.parts import as_fields, decode_namespace, encode_match, encode_namespace, required_namespace
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
    return cache_pb2.ExplainResponse(workers=[as_fields(value) for value in values])


def encode_event(value: Event, epoch: str, seq: int) -> cache_pb2.WatchResponse:
    if isinstance(value, Stored):
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, stored=_stored(value))
    if isinstance(value, Removed):
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, removed=cache_pb2.PagesRemoved(**value._asdict()))
    if isinstance(value, Connection):
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, connection=cache_pb2.WorkerConnection(**value._asdict()))
    cleared = cache_pb2.CacheCleared(worker_id=value.worker_id or "")
    return cache_pb2.WatchResponse(epoch=epoch, seq=seq, cleared=cleared)


def encode_present_state_end(num_pages: int, epoch: str, seq: int) -> cache_pb2.WatchResponse:
    end = cache_pb2.PresentStateEnd(num_pages=num_pages)
    return cache_pb2.WatchResponse(epoch=epoch, seq=seq, present_state_end=end)


def _stored(value: Stored) -> cache_pb2.PagesStored:
    return cache_pb2.PagesStored(**{**value._asdict(), "namespace": encode_namespace(value.namespace)})


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
    told = as_fields(value)
    told["workers"] = [_with_misses(worker) for worker in value.workers]
    for worker in told["workers"]:
        del worker["fetches_paused"]  # for metrics; Explain tells people
    told["attachments"] = _with_misses(value.attachments)
    told["attachments"]["engines"] = [_with_misses(engine) for engine in value.attachments.engines]
    del told["by_engine"]
    return cache_pb2.StatsResponse(**told, version=package_version())


def _with_misses(value: WorkerStats | AttachmentStats | AttachedEngine) -> dict[str, Any]:
    return {**as_fields(value), "misses": {reason.name.lower(): count for reason, count in value.misses}}
