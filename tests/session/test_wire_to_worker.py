"""What the cache service says arrives at the worker as it was said."""

from __future__ import annotations

from typing import Any

import pytest

from protos.v1 import cache_pb2, types_pb2
from session.errors import InvalidInput
from session.limits import SessionLimits
from session.messages import ExtendGrant, Forget, Grant, Refusal, Remap, RunRefusal, StepReply, Welcome
from session.wire.hello import decode_welcome, encode_welcome
from session.wire.parts import decode_transfer, encode_match
from session.wire.reply import decode_order, decode_reply, encode_order, encode_reply
from session.words import (
    GroupKind,
    GroupPages,
    HostTierKind,
    Match,
    MissReason,
    Namespace,
    PageId,
    RefusalReason,
    ReleaseReason,
    SequenceId,
    StateSlot,
    TicketId,
    Transfer,
    TransferPages,
    TransferStatus,
)
from tests.session.messages import over_the_wire, u32

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
    restore=(StateSlot(2, 48, PageId(4)),),
    snapshots=(StateSlot(2, 64, PageId(5)),),
    working=(StateSlot(2, 0, PageId(6)),),
    rolling=(StateSlot(2, 0, PageId(7)),),
)
REFUSAL = Refusal(SequenceId(3), RefusalReason.NO_ROOM, "full: 3 pages short")
INVALID = Refusal(SequenceId(4), RefusalReason.INVALID, "is too long", "step.acquires[0].namespace.salt")


def test_welcome() -> None:
    limits = SessionLimits(*range(11, 19))
    said = Welcome("epoch", 2**63, 12, limits)
    heard = decode_welcome(over_the_wire(encode_welcome(said)).welcome)
    assert (heard.epoch, heard.generation, heard.last_step_id) == ("epoch", 2**63, 12)
    assert heard.limits._asdict() == limits._asdict()


FORGET = Forget(9, everything=False, namespaces=(Namespace("model", "adapter", "salt"), Namespace("model")))


@pytest.mark.parametrize("forget", [FORGET, Forget(3, everything=True)])
def test_what_was_cleared_is_told_in_a_welcome_and_in_an_order(forget: Forget) -> None:
    said = Welcome("epoch", 1, 0, SessionLimits(), ("inventory",), forget)
    assert decode_welcome(over_the_wire(encode_welcome(said)).welcome) == said
    assert decode_order(over_the_wire(encode_order(forget)).order) == forget


def test_step_reply() -> None:
    said = StepReply(
        7,
        grants=(GRANT, GRANT._replace(fetches=(), restore=(), snapshots=())),
        extends=(
            ExtendGrant(SequenceId(1), (GroupPages(1, 4, u32([9, 10])),)),
            ExtendGrant(
                SequenceId(2),
                (GroupPages(0, 3, u32([11])), GroupPages(1, 5, u32([12]))),
                (StateSlot(2, 80, PageId(1)),),
            ),
        ),
        refusals=(REFUSAL, INVALID),
        remaps=(Remap(SequenceId(4), (GroupPages(0, 1, u32([20, 21])),)),),
        free_pages=(0, 5, 2**32 - 1),
        run_refusals=(RunRefusal(2**63, RefusalReason.INVALID, "is empty", "step.inventory.runs[1].tokens"),),
    )
    heard = decode_reply(over_the_wire(encode_reply(said, 3)).step_reply, 3)
    assert heard == said


def test_free_pages_are_told_for_each_group() -> None:
    message = over_the_wire(encode_reply(StepReply(1, free_pages=(3, 4)), 2)).step_reply
    with pytest.raises(InvalidInput, match="free_pages: has 2 numbers for 3 groups"):
        decode_reply(message, 3)
    message.free_pages = b"123"
    with pytest.raises(InvalidInput, match="free_pages"):
        decode_reply(message, 3)


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
    ],
)
def test_the_words_of_a_session_are_the_protocols(words: Any, enum: Any, prefix: str) -> None:
    ours = {f"{prefix}{word.name}": word.value for word in words}
    assert ours | {f"{prefix}UNSPECIFIED": 0} == dict(enum.items())


def test_extends_of_some_groups_leave_the_others_empty() -> None:
    """A group without new pages has zeros in the packed arrays. Of three groups the middle one grows."""
    grants = (
        ExtendGrant(SequenceId(1), (GroupPages(1, 4, u32([9, 8])),)),
        ExtendGrant(SequenceId(2), ()),
        ExtendGrant(SequenceId(3), tuple(GroupPages(g, g, u32([20 + g])) for g in range(3))),
    )
    extends = encode_reply(StepReply(1, extends=grants), 3).step_reply.extends
    assert extends.first_pages == u32([0, 4, 0, 0, 0, 0, 0, 1, 2])
    assert extends.num_pages == u32([0, 2, 0, 0, 0, 0, 1, 1, 1])
    assert extends.page_ids == u32([9, 8, 20, 21, 22])
