"""Calls outside of a session: requests are decoded field by field, answers carry what the manager said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cache_service import codec
from cache_service.core.base.stats import (
    AttachedEngine,
    AttachmentStats,
    GroupStats,
    HostTierStats,
    ManagerStats,
    WorkerStats,
)
from cache_service.core.base.types import (
    Age,
    Cleared,
    Explanation,
    FetchPolicy,
    Holder,
    Removed,
    Residence,
    Segment,
    SpillPolicy,
    Stored,
    WorkerMatch,
)
from protos.v1 import cache_pb2, types_pb2
from rpc.version import package_version
from session.errors import InvalidInput
from session.messages import Rates
from session.wire.parts import encode_match
from session.words import (
    GroupKind,
    Match,
    MissReason,
    Namespace,
    PageHash,
    SequenceId,
    WorkerId,
)
from tests.session.messages import MODEL, tokens
from tests.session.test_wire_to_service import LIMITS, unknown_field

MATCH = Match(64, 48, 16, "swa", MissReason.EVICTED)


@pytest.mark.parametrize("kind", [cache_pb2.MatchRequest, cache_pb2.ExplainRequest, cache_pb2.PinRequest])
def test_a_question_about_a_prompt(kind: Any) -> None:
    good = kind(namespace=types_pb2.Namespace(model=MODEL, adapter="a", salt="s"), tokens=tokens(5))
    strange = types_pb2.Namespace(model=MODEL)
    unknown_field()(strange)
    assert codec.decode_prompt(good, LIMITS) == (Namespace(MODEL, "a", "s"), tokens(5))
    for field, bad in (
        ("request.namespace", kind(tokens=tokens(5))),
        ("request.namespace", kind(namespace=strange, tokens=tokens(5))),
        ("request.namespace.model", kind(namespace=types_pb2.Namespace(salt="s"), tokens=tokens(5))),
        ("request.tokens", kind(namespace=good.namespace)),
        ("request.tokens", kind(namespace=good.namespace, tokens=b"12345")),
        ("request.tokens", kind(namespace=good.namespace, tokens=tokens(101))),
    ):
        with pytest.raises(InvalidInput) as caught:
            codec.decode_prompt(bad, LIMITS)
        assert caught.value.field == field


def test_scopes_and_single_fields() -> None:
    assert codec.decode_scope(cache_pb2.ClearRequest()) is None
    assert codec.decode_scope(cache_pb2.ClearRequest(namespace=types_pb2.Namespace(model="m"))) == Namespace("m")
    with pytest.raises(InvalidInput, match=r"request\.namespace\.model"):
        codec.decode_scope(cache_pb2.ClearRequest(namespace=types_pb2.Namespace()))
    assert codec.decode_worker_id(cache_pb2.MatchRequest()) is None
    assert codec.decode_worker_id(cache_pb2.MatchRequest(worker_id="w")) == "w"
    assert codec.decode_ttl_ms(cache_pb2.PinRequest(ttl_ms=5), 10) == 5
    with pytest.raises(InvalidInput, match=r"request\.ttl_ms"):
        codec.decode_ttl_ms(cache_pb2.PinRequest(ttl_ms=11), 10)


def test_residences_have_the_protocols_numbers() -> None:
    ours = {f"RESIDENCE_{word.name}": word.value for word in Residence}
    assert ours | {"RESIDENCE_UNSPECIFIED": 0} == dict(cache_pb2.Residence.items())


def test_matches_and_explanations() -> None:
    worker = WorkerId("w1")
    matches = cache_pb2.MatchResponse.FromString(codec.encode_match_response([WorkerMatch(worker, "here:1", MATCH)]))
    assert (matches.workers[0].worker_id, matches.workers[0].endpoint) == ("w1", "here:1")
    assert matches.workers[0].match.limiting_group == "swa"
    segments = (
        Segment(0, 48, Residence.DEVICE, last_used=Age(5, 8)),
        Segment(48, 16, Residence.MISSING, MissReason.OTHER_SALT, gone=Age(0, 9)),
    )
    held = (Holder(SequenceId(7), 48), Holder(SequenceId(5), 16))
    value = Explanation(worker, "here:1", MATCH, segments, ("because",), 21, 22, held, 23, 24)
    told = codec.encode_explain_response([value]).workers[0]
    assert (told.pinned_tokens, told.pin_left_ms, told.num_holders, told.spilling_tokens) == (21, 22, 23, 24)
    assert [(one.sequence_id, one.num_tokens) for one in told.holders] == [(7, 48), (5, 16)]
    assert [(s.first_token, s.num_tokens, s.residence, s.miss_reason) for s in told.segments] == [
        (0, 48, cache_pb2.RESIDENCE_DEVICE, types_pb2.MISS_REASON_NONE),
        (48, 16, cache_pb2.RESIDENCE_MISSING, types_pb2.MISS_REASON_OTHER_SALT),
    ]
    assert list(told.notes) == ["because"]
    used, gone = told.segments
    assert (used.last_used, gone.gone) == (cache_pb2.Age(least_ms=5, most_ms=8), cache_pb2.Age(most_ms=9))
    assert not used.HasField("gone") and not gone.HasField("last_used")


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


ENGINE = AttachedEngine(71, "vllm", "model", "keys", *range(72, 82), misses=((MissReason.REFUSED, 82),), peer="p")
ATTACHED = AttachmentStats(*range(51, 62), ((MissReason.EVICTED, 62),), 63, 64, (ENGINE,))


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
        restored_pages=35,
        restored_tokens=36,
        rates=Rates(37.0, 38.0, 39.0),
        declined_tokens=40,
    )
    host = HostTierStats(41, 42, 43, 44, 45, 46, 47, True, SpillPolicy.WRITE_BACK, FetchPolicy.ALWAYS)
    message = codec.encode_stats_response(ManagerStats("epoch", "slru", (worker,), host, ATTACHED))
    assert (message.epoch, message.policy, message.version) == ("epoch", "slru", package_version())
    told = message.workers[0]
    for field in WorkerStats._fields:
        if field not in ("groups", "misses", "rates", "fetches_paused"):
            assert getattr(told, field) == getattr(worker, field), field
    assert dict(told.misses) == {"evicted": 31, "page_tail": 32}
    assert {field.name: value for field, value in told.rates.ListFields()} == worker.rates._asdict()
    for field in GroupStats._fields:
        assert getattr(told.groups[0], field) == getattr(group, field), field
    for field in HostTierStats._fields:
        want = getattr(host, field)
        assert getattr(message.host_tier, field) == getattr(want, "value", want), field
    for field in AttachmentStats._fields:
        if field != "engines":
            want = {"evicted": 62} if field == "misses" else getattr(ATTACHED, field)
            assert getattr(message.attachments, field) == want, field
    for field in AttachedEngine._fields:
        want = {"refused": 82} if field == "misses" else getattr(ENGINE, field)
        assert getattr(message.attachments.engines[0], field) == want, field


def test_each_worker_has_its_own_match_among_equal_ones() -> None:
    other = MATCH._replace(usable_tokens=32, limiting_group="", miss_reason=MissReason.NEVER_SEEN)
    given = [WorkerMatch(WorkerId(f"w{n}"), f"here:{n}", (MATCH, other, MATCH)[n]) for n in range(3)]
    assert codec.encode_match_response(given) == match_response(given).SerializeToString()


@pytest.mark.parametrize("num_chars", [0, 1, 60, 90, 105, 106, 107, 120, 250, 16_250, 16_360, 17_000])
def test_matches_of_all_lengths_are_encoded_as_protobuf_does(num_chars: int) -> None:
    """Lengths of one byte, two and three stand before a worker."""
    nothing = Match(0, 0, 0, "", MissReason.UNSPECIFIED)
    given = [WorkerMatch(WorkerId("w" * num_chars), "", match) for match in (MATCH, nothing)]
    assert codec.encode_match_response(given) == match_response(given).SerializeToString()
    assert codec.encode_match_response([]) == b""


def match_response(values: Sequence[WorkerMatch]) -> cache_pb2.MatchResponse:
    """The response as one message, field by field."""
    workers = [
        cache_pb2.WorkerMatch(worker_id=value.worker_id, endpoint=value.endpoint, match=encode_match(value.match))
        for value in values
    ]
    return cache_pb2.MatchResponse(workers=workers)
