"""No damaged message and no page beyond a pool comes through."""

from __future__ import annotations

import zlib
from array import array

import pytest
from google.protobuf.message import DecodeError

from protos.v1 import cache_pb2, types_pb2
from session.errors import FieldError
from session.messages import ExtendGrant, Grant, Remap, StepReply
from session.wire.seal import open_response
from session.words import (
    GroupKind,
    GroupPages,
    GroupSpec,
    Match,
    SequenceId,
    StateSlot,
    TicketId,
    Transfer,
    TransferPages,
)
from worker_service.core.errors import SessionLost, StepRejected
from worker_service.session_checks import PoolCheck

GROUPS = (
    GroupSpec("full", GroupKind.FULL, 10, 0),
    GroupSpec("window", GroupKind.WINDOW, 6, 0, 8),
    GroupSpec("state", GroupKind.STATE, 4, 0),
)


def u32(*ids: int) -> bytes:
    return array("I", ids).tobytes()


def check() -> PoolCheck:
    pools = PoolCheck(GROUPS, 4)
    pools.take_limit(40)
    return pools


def grant(*tables: GroupPages, **fields: object) -> StepReply:
    granted = Grant(SequenceId(1), 8, 8, 0, tables, Match(8, 8, 0, "", 1))
    return StepReply(1, grants=(granted._replace(**fields),))


def test_what_fits_passes() -> None:
    slots = (StateSlot(2, 8, 4),)
    check().reply(grant(GroupPages(0, 0, u32(1, 10)), GroupPages(1, 0, u32(0, 6)), working=slots, snapshots=slots))
    extend = ExtendGrant(SequenceId(1), (GroupPages(0, 9, u32(10)), GroupPages(2, 0, b"")), slots)
    remap = Remap(SequenceId(1), (GroupPages(0, 0, u32(3)),))
    check().reply(StepReply(1, extends=(extend,), remaps=(remap,)))
    check().order(Transfer(TicketId(1), (TransferPages(0, u32(0, 10), "k:", bytes(64)),), 0, 2))


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        (grant(GroupPages(0, 0, u32(1, 11))), "grants.tables: page 11"),
        (grant(GroupPages(0, 0, u32(2**32 - 1))), "grants.tables: page"),
        (grant(GroupPages(1, 0, u32(7))), "page 7 is beyond the 6 pages of group window"),
        (grant(GroupPages(0, 0, u32(1, 0))), "no holes"),
        (grant(GroupPages(2, 0, u32(1))), "no block table"),
        (grant(GroupPages(3, 0, u32(1))), "group 3 is none of 3"),
        (grant(GroupPages(0, 10, u32(1))), "more than 10"),
        (grant(GroupPages(0, 2**32 - 1, u32(1))), "more than 10"),
        (grant(working=(StateSlot(2, 8, 5),)), "grants.working: slot 5"),
        (grant(restore=(StateSlot(2, 8, 0),)), "grants.restore: slot 0"),
        (grant(rolling=(StateSlot(0, 8, 1),)), "grants.rolling"),
        (grant(snapshots=(StateSlot(2, 44, 1),)), "grants.leave: boundary 44"),
        (
            grant(fetches=(Transfer(TicketId(1), (TransferPages(0, u32(11), "k:", bytes(32)),), 0, 1),)),
            "grants.fetches: page 11",
        ),
        (StepReply(1, extends=(ExtendGrant(SequenceId(1), (GroupPages(0, 1, u32(11)),)),)), "extends: page 11"),
        (StepReply(1, remaps=(Remap(SequenceId(1), (GroupPages(0, 1, u32(11)),)),)), "remaps.pages: page 11"),
    ],
)
def test_a_reply_beyond_the_pools_is_rejected(reply: StepReply, field: str) -> None:
    with pytest.raises(StepRejected, match=field):
        check().reply(reply)


def test_an_order_beyond_the_pools_ends_the_session() -> None:
    with pytest.raises(SessionLost, match="page 7"):
        check().order(Transfer(TicketId(1), (TransferPages(1, u32(7), "k:", bytes(32)),), 0, 1))


def test_no_flipped_bit_of_a_reply_comes_through() -> None:
    """Without the checksum a quarter of these name another page of the pool."""
    tables = [types_pb2.GroupPages(group=0, page_ids=u32(*range(1, 11)))]
    granted = types_pb2.Grant(sequence_id=1, usable_tokens=8, tables=tables)
    message = cache_pb2.ManagerMessage(step_reply=cache_pb2.StepReply(step_id=3, grants=[granted]))
    body = message.SerializeToString()
    sealed = cache_pb2.SessionResponse(body=body, crc32=zlib.crc32(body))
    assert open_response(sealed) == message
    wire = sealed.SerializeToString()
    for bit in range(8 * len(wire)):
        damaged = bytearray(wire)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((FieldError, DecodeError)):
            open_response(cache_pb2.SessionResponse.FromString(bytes(damaged)))
