"""What the core says arrives at the worker as it was said: our encoder against the worker's decoder."""

from __future__ import annotations

from typing import Any

import pytest

from cache_service import codec
from cache_service.core.base.stats import GroupStats, HostTierStats, ManagerStats, WorkerStats
from cache_service.core.base.types import (
    Cleared,
    Explanation,
    FetchPolicy,
    Removed,
    Residence,
    Segment,
    SpillPolicy,
    Stored,
    WorkerMatch,
)
from protos.v1 import cache_pb2, types_pb2
from session.limits import SessionLimits
from session.messages import ExtendGrant, Grant, Refusal, Remap, StepReply, Welcome
from session.wire.hello import decode_welcome, encode_welcome
from session.wire.parts import decode_transfer, encode_match
from session.wire.reply import decode_reply, encode_order, encode_reply
from session.words import (
    GroupKind,
    GroupPages,
    HostTierKind,
    Match,
    MissReason,
    Namespace,
    PageHash,
    PageId,
    RefusalReason,
    ReleaseReason,
    SequenceId,
    SnapshotSlot,
    TicketId,
    Transfer,
    TransferPages,
    TransferStatus,
    WorkerId,
)
from tests.cache_service.messages import tokens, u32

MATCH = Match(64, 48, 16, "swa", MissReason.EVICTED)


HASHES = bytes(range(64))


TRANSFER = Transfer(
    TicketId(9),
    (
        TransferPages(0, u32([5, 6]), "stemcache:1:f:0:", HASHES),
        TransferPages(1, u32([0, 8]), "stemcache:1:f:1:", HASHES),
    ),
    first_page=4,
    num_pages=2,
)
GRANT = Grant(
    SequenceId(2**63 + 1),
    48,
    32,
    16,
    (GroupPages(0, 0, u32([1, 2, 3])), GroupPages(1, 2, u32([7]))),
    MATCH,
    fetches=(TRANSFER, TRANSFER._replace(ticket=TicketId(10))),
    restore=(SnapshotSlot(2, 48, PageId(4)),),
    leave=(SnapshotSlot(2, 64, PageId(5)),),
    working=(SnapshotSlot(2, 0, PageId(6)),),
    rolling=(SnapshotSlot(2, 0, PageId(7)),),
)
REFUSAL = Refusal(SequenceId(3), RefusalReason.NO_ROOM, "full: 3 pages short")
INVALID = Refusal(SequenceId(4), RefusalReason.INVALID, "is too long", "step.acquires[0].namespace.salt")


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def test_welcome() -> None:
    limits = SessionLimits(*range(11, 19))
    said = Welcome("epoch", 2**63, 12, limits)
    heard = decode_welcome(over_the_wire(encode_welcome(said)).welcome)
    assert (heard.epoch, heard.generation, heard.last_step_id) == ("epoch", 2**63, 12)
    assert heard.limits._asdict() == limits._asdict()


def test_step_reply() -> None:
    said = StepReply(
        7,
        grants=(GRANT, GRANT._replace(fetches=(), restore=(), leave=())),
        extends=(
            ExtendGrant(SequenceId(1), (GroupPages(1, 4, u32([9, 10])),)),
            ExtendGrant(
                SequenceId(2),
                (GroupPages(0, 3, u32([11])), GroupPages(1, 5, u32([12]))),
                (SnapshotSlot(2, 80, PageId(1)),),
            ),
        ),
        refusals=(REFUSAL, INVALID),
        remaps=(Remap(SequenceId(4), (GroupPages(0, 1, u32([20, 21])),)),),
    )
    heard = decode_reply(over_the_wire(encode_reply(said, 3)).step_reply, 3)
    assert heard == said


def test_an_empty_reply() -> None:
    heard = decode_reply(over_the_wire(encode_reply(StepReply(1), 2)).step_reply, 2)
    assert heard == StepReply(1)


def test_order() -> None:
    heard = over_the_wire(encode_order(TRANSFER)).order.spill
    assert decode_transfer(heard, "order.spill") == TRANSFER


@pytest.mark.parametrize("reason", list(MissReason))
def test_miss_reasons_have_the_protocols_numbers(reason: MissReason) -> None:
    message = encode_match(MATCH._replace(miss_reason=reason))
    assert types_pb2.MissReason.Name(message.miss_reason) == f"MISS_REASON_{reason.name}"


@pytest.mark.parametrize(
    ("words", "enum", "prefix"),
    [
        (GroupKind, types_pb2.GroupKind, "GROUP_KIND_"),
        (RefusalReason, types_pb2.RefusalReason, "REFUSAL_REASON_"),
        (ReleaseReason, cache_pb2.ReleaseReason, "RELEASE_REASON_"),
        (TransferStatus, cache_pb2.TransferStatus, "TRANSFER_STATUS_"),
        (HostTierKind, cache_pb2.HostTierKind, "HOST_TIER_KIND_"),
        (Residence, cache_pb2.Residence, "RESIDENCE_"),
    ],
)
def test_the_cores_words_are_the_protocols(words: Any, enum: Any, prefix: str) -> None:
    ours = {f"{prefix}{word.name}": word.value for word in words}
    assert ours | {f"{prefix}UNSPECIFIED": 0} == dict(enum.items())


def test_matches_and_explanations() -> None:
    worker = WorkerId("w1")
    matches = codec.encode_match_response([WorkerMatch(worker, "here:1", MATCH)])
    assert (matches.workers[0].worker_id, matches.workers[0].endpoint) == ("w1", "here:1")
    assert matches.workers[0].match.limiting_group == "swa"
    segments = (
        Segment(0, 48, Residence.DEVICE),
        Segment(48, 16, Residence.MISSING, MissReason.OTHER_SALT),
    )
    explained = codec.encode_explain_response([Explanation(worker, "here:1", MATCH, segments, ("because",))])
    told = explained.workers[0]
    assert [(s.first_token, s.num_tokens, s.residence, s.miss_reason) for s in told.segments] == [
        (0, 48, cache_pb2.RESIDENCE_DEVICE, types_pb2.MISS_REASON_NONE),
        (48, 16, cache_pb2.RESIDENCE_MISSING, types_pb2.MISS_REASON_OTHER_SALT),
    ]
    assert list(told.notes) == ["because"]


def test_events() -> None:
    worker, hashes = WorkerId("w1"), (PageHash(b"a" * 32), PageHash(b"b" * 32))
    stored = Stored(worker, 1, Namespace("m", "a", "s"), b"p" * 32, hashes, tokens(32))
    message = codec.encode_event(stored, "epoch", 4)
    assert (message.epoch, message.seq, message.WhichOneof("event")) == ("epoch", 4, "stored")
    assert message.stored == cache_pb2.PagesStored(
        worker_id="w1",
        group=1,
        parent_hash=b"p" * 32,
        page_hashes=hashes,
        tokens=tokens(32),
        namespace=types_pb2.Namespace(model="m", adapter="a", salt="s"),
    )
    removed = codec.encode_event(Removed(worker, 2, hashes), "epoch", 5).removed
    assert removed == cache_pb2.PagesRemoved(worker_id="w1", group=2, page_hashes=hashes)
    assert codec.encode_event(Cleared(worker), "epoch", 6).cleared.worker_id == "w1"
    assert codec.encode_event(Cleared(None), "epoch", 7).cleared.worker_id == ""
    assert codec.encode_events_lost(3, "epoch", 8).lost.num_events == 3


def test_every_statistic_arrives() -> None:
    """Each field gets a value of its own, so that no two can be swapped unseen."""
    group = GroupStats("full", GroupKind.FULL, 11, 12, 13, 14)
    worker = WorkerStats(
        WorkerId("w1"),
        "here:1",
        "first",
        "model",
        True,
        (group,),
        *range(21, 32),
        misses=((MissReason.EVICTED, 31), (MissReason.PAGE_TAIL, 32)),
        pinned_tokens=33,
        matched_tokens=34,
    )
    host = HostTierStats(41, 42, 43, 44, 45, 46, 47, True, SpillPolicy.WRITE_BACK, FetchPolicy.ALWAYS)
    message = codec.encode_stats_response(ManagerStats("epoch", "slru", (worker,), host))
    assert (message.epoch, message.policy) == ("epoch", "slru")
    told = message.workers[0]
    for field in WorkerStats._fields:
        if field not in ("groups", "misses"):
            assert getattr(told, field) == getattr(worker, field), field
    assert dict(told.misses) == {"evicted": 31, "page_tail": 32}
    for field in GroupStats._fields:
        assert getattr(told.groups[0], field) == getattr(group, field), field
    for field in HostTierStats._fields:
        want = getattr(host, field)
        assert getattr(message.host_tier, field) == getattr(want, "value", want), field


def test_each_worker_has_its_own_match_among_equal_ones() -> None:
    other = MATCH._replace(usable_tokens=32, limiting_group="", miss_reason=MissReason.NEVER_SEEN)
    given = [WorkerMatch(WorkerId(f"w{n}"), f"here:{n}", (MATCH, other, MATCH)[n]) for n in range(3)]
    message = codec.encode_match_response(given)
    assert [(w.worker_id, w.endpoint) for w in message.workers] == [
        ("w0", "here:0"),
        ("w1", "here:1"),
        ("w2", "here:2"),
    ]
    assert [w.match for w in message.workers] == [encode_match(value.match) for value in given]


def test_extends_of_some_groups_leave_the_others_empty() -> None:
    """A group without new pages stands in the packed arrays, with none; three groups, of which the middle one grows."""
    grants = (
        ExtendGrant(SequenceId(1), (GroupPages(1, 4, u32([9, 8])),)),
        ExtendGrant(SequenceId(2), ()),
        ExtendGrant(SequenceId(3), tuple(GroupPages(g, g, u32([20 + g])) for g in range(3))),
    )
    extends = encode_reply(StepReply(1, extends=grants), 3).step_reply.extends
    assert extends.first_pages == u32([0, 4, 0, 0, 0, 0, 0, 1, 2])
    assert extends.num_pages == u32([0, 2, 0, 0, 0, 0, 1, 1, 1])
    assert extends.page_ids == u32([9, 8, 20, 21, 22])
