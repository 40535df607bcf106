"""The core's words -> messages for peers.

Knows no rule: what the core says is sent as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from cache_service.codec.version import CAPABILITIES
from cache_service.core.base.stats import ClearResult, GroupStats, HostTierStats, ManagerStats, WorkerStats
from cache_service.core.base.types import Event, Explanation, Removed, Segment, Stored, WorkerMatch
from protos.v1 import cache_pb2, types_pb2
from session.messages import ExtendGrant, Grant, Refusal, Remap, StepReply, Welcome
from session.words import PAGE_ID_BYTES, GroupPages, Match, Namespace, SnapshotSlot, Transfer


def welcome(value: Welcome) -> cache_pb2.ManagerMessage:
    message = cache_pb2.Welcome(
        epoch=value.epoch,
        generation=value.generation,
        last_step_id=value.last_step_id,
        limits=cache_pb2.SessionLimits(**value.limits._asdict()),
        capabilities=sorted(CAPABILITIES),
    )
    return cache_pb2.ManagerMessage(welcome=message)


def step_reply(value: StepReply, num_groups: int) -> cache_pb2.ManagerMessage:
    """Fills the message in place: a submessage that is passed on is copied."""
    message = cache_pb2.ManagerMessage()
    reply = message.step_reply
    reply.step_id = value.step_id
    for grant in value.grants:
        _fill_grant(reply.grants.add(), grant)
    if value.extends:
        _fill_extend_grants(reply.extends, value.extends, num_groups)
    if value.refusals:
        reply.refusals.extend([_refusal(refusal) for refusal in value.refusals])
    if value.remaps:
        reply.remaps.extend([_remap(remap) for remap in value.remaps])
    return message


def order(value: Transfer) -> cache_pb2.ManagerMessage:
    message = cache_pb2.ManagerMessage()
    _fill_transfer(message.order.spill, value)
    return message


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
        if grant.leave:
            message.snapshots.add(sequence_id=grant.sequence_id, leave=_slots(grant.leave))
    message.sequence_ids = array("Q", [grant.sequence_id for grant in grants]).tobytes()
    message.first_pages = array("I", first_pages).tobytes()
    message.num_pages = array("I", num_pages).tobytes()
    message.page_ids = b"".join(page_ids)


def _without_gaps(pages: Iterable[GroupPages], num_groups: int) -> list[GroupPages]:
    """One item for each group; no page where there was no item."""
    items = [GroupPages(group, 0, b"") for group in range(num_groups)]
    for item in pages:
        items[item.group] = item
    return items


def _fill_grant(message: types_pb2.Grant, value: Grant) -> None:
    message.sequence_id = value.sequence_id
    message.usable_tokens = value.usable_tokens
    message.cached_tokens = value.cached_tokens
    message.fetched_tokens = value.fetched_tokens
    for group, first_page, page_ids in value.tables:
        message.tables.add(group=group, first_page=first_page, page_ids=bytes(page_ids))
    for fetch in value.fetches:
        _fill_transfer(message.fetches.add(), fetch)
    message.restore.extend(_slots(value.restore))
    message.leave.extend(_slots(value.leave))
    message.working.extend(_slots(value.working))
    message.rolling.extend(_slots(value.rolling))
    message.match.CopyFrom(match_result(value.match))


def _refusal(value: Refusal) -> types_pb2.Refusal:
    reason = types_pb2.RefusalReason.ValueType(value.reason)
    return types_pb2.Refusal(sequence_id=value.sequence_id, reason=reason, detail=value.detail, field=value.field)


def _remap(value: Remap) -> cache_pb2.Remap:
    return cache_pb2.Remap(sequence_id=value.sequence_id, pages=_pages(value.pages))


def _pages(values: Iterable[GroupPages]) -> list[types_pb2.GroupPages]:
    return [types_pb2.GroupPages(group=v.group, first_page=v.first_page, page_ids=bytes(v.page_ids)) for v in values]


def _slots(values: Iterable[SnapshotSlot]) -> list[types_pb2.SnapshotSlot]:
    return [types_pb2.SnapshotSlot(group=v.group, boundary_tokens=v.boundary_tokens, slot=v.slot) for v in values]


def _fill_transfer(message: types_pb2.Transfer, value: Transfer) -> None:
    message.ticket = value.ticket
    message.first_page = value.first_page
    message.num_pages = value.num_pages
    for group, page_ids, key_prefix, page_hashes in value.groups:
        message.groups.add(group=group, page_ids=page_ids, key_prefix=key_prefix, page_hashes=page_hashes)


def match_result(value: Match) -> types_pb2.MatchResult:
    return types_pb2.MatchResult(
        matched_tokens=value.matched_tokens,
        usable_tokens=value.usable_tokens,
        host_tokens=value.host_tokens,
        limiting_group=value.limiting_group,
        miss_reason=types_pb2.MissReason.ValueType(value.miss_reason),
    )


def match_response(values: Iterable[WorkerMatch]) -> cache_pb2.MatchResponse:
    """Fills each worker in place: a submessage that is passed on is copied, which costs twice as much."""
    message = cache_pb2.MatchResponse()
    add, reason_of = message.workers.add, types_pb2.MissReason.ValueType
    for worker_id, endpoint, (matched, usable, host, limiting_group, miss_reason) in values:
        match = add(worker_id=worker_id, endpoint=endpoint).match
        match.miss_reason = reason_of(miss_reason)
        if matched:
            match.matched_tokens = matched
            match.usable_tokens = usable
        if host:
            match.host_tokens = host
        if limiting_group:
            match.limiting_group = limiting_group
    return message


def explain_response(values: Iterable[Explanation]) -> cache_pb2.ExplainResponse:
    return cache_pb2.ExplainResponse(workers=[_explanation(value) for value in values])


def _explanation(value: Explanation) -> cache_pb2.WorkerExplanation:
    return cache_pb2.WorkerExplanation(
        worker_id=value.worker_id,
        endpoint=value.endpoint,
        match=match_result(value.match),
        segments=[_segment(segment) for segment in value.segments],
        notes=value.notes,
        pinned_tokens=value.pinned_tokens,
        pin_left_ms=value.pin_left_ms,
    )


def _segment(value: Segment) -> cache_pb2.Segment:
    return cache_pb2.Segment(
        first_token=value.first_token,
        num_tokens=value.num_tokens,
        residence=cache_pb2.Residence.ValueType(value.residence),
        miss_reason=types_pb2.MissReason.ValueType(value.miss_reason),
    )


def _namespace(value: Namespace) -> types_pb2.Namespace:
    return types_pb2.Namespace(model=value.model, adapter=value.adapter, salt=value.salt)


def event(value: Event, epoch: str, seq: int) -> cache_pb2.WatchResponse:
    if isinstance(value, Stored):
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, stored=_stored(value))
    if isinstance(value, Removed):
        removed = cache_pb2.PagesRemoved(worker_id=value.worker_id, group=value.group, page_hashes=value.page_hashes)
        return cache_pb2.WatchResponse(epoch=epoch, seq=seq, removed=removed)
    cleared = cache_pb2.CacheCleared(worker_id=value.worker_id or "")
    return cache_pb2.WatchResponse(epoch=epoch, seq=seq, cleared=cleared)


def _stored(value: Stored) -> cache_pb2.PagesStored:
    return cache_pb2.PagesStored(
        worker_id=value.worker_id,
        group=value.group,
        parent_hash=value.parent_hash,
        page_hashes=value.page_hashes,
        tokens=value.tokens,
        namespace=_namespace(value.namespace),
    )


def events_lost(num_events: int, epoch: str, seq: int) -> cache_pb2.WatchResponse:
    return cache_pb2.WatchResponse(epoch=epoch, seq=seq, lost=cache_pb2.EventsLost(num_events=num_events))


def clear_response(value: ClearResult) -> cache_pb2.ClearResponse:
    return cache_pb2.ClearResponse(
        num_pages=value.num_pages, num_host_rows=value.num_host_rows, num_pinned_pages=value.num_pinned_pages
    )


def stats_response(value: ManagerStats) -> cache_pb2.StatsResponse:
    return cache_pb2.StatsResponse(
        epoch=value.epoch,
        workers=[_worker_stats(worker) for worker in value.workers],
        host_tier=_host_tier_stats(value.host_tier),
        policy=value.policy,
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
