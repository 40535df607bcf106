"""What a caller did wrong: an error of the right kind that names the field, and nothing changed.

Each row is one wrong thing in an otherwise good call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cache_service.core.base.errors import UnknownTicket
from cache_service.core.cache_manager import CacheManager
from session.errors import InvalidInput
from session.messages import Ack, Acquire, Adopt, BadItem, Extend, Hello, Publish, Refusal, Release
from session.words import GroupPages, GroupSpec, Namespace, RefusalReason, SequenceId, StateSlot, TicketId, WorkerId
from tests.core.at_once import explain_at_once
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import span
from tests.core.world import DONE, FINGERPRINT, FINISHED, NS, World, full, pack, state, window

A, B, C, UNKNOWN = SequenceId(1), SequenceId(2), SequenceId(3), SequenceId(404)
GOOD = Acquire(SequenceId(50), NS, pack(span(1, 4)))
GOOD_TOO = Acquire(SequenceId(51), NS, pack(span(1, 4)))
OTHER = Acquire(SequenceId(52), NS, pack(span(1, 4)))


def busy() -> FakeWorker:
    """Sequence 1 has prefilled 5 of its 5 tokens and holds three pages of 2; 2 and 3 have just begun."""
    worker = FakeWorker(World(watch=True), [full(24), window(24, 4), state(24)], 2)
    worker.model = "model"
    worker.restart("i1")
    worker.prefill(worker.start(span(1, 5), sequence_id=1))
    worker.start(span(11, 12), sequence_id=2)
    worker.start(span(21, 22), sequence_id=3)
    return worker


# (what is wrong, the bad item's field in its step, and where it stands)
ITEMS: list[tuple[str, str, str, list[Any]]] = [
    ("torn tokens", "acquires", "tokens", [GOOD._replace(tokens=b"abc")]),
    ("no tokens", "acquires", "tokens", [GOOD._replace(tokens=b"")]),
    ("negative reserve", "acquires", "reserve_pages", [GOOD._replace(reserve_pages=-1)]),
    ("negative chunk", "acquires", "chunk_tokens", [GOOD._replace(chunk_tokens=-1)]),
    ("negative kept tokens", "acquires", "kept_tokens", [GOOD._replace(kept_tokens=-1)]),
    ("live sequence", "acquires", "sequence_id", [GOOD._replace(sequence_id=A)]),
    ("twice in a step", "acquires", "sequence_id", [OTHER, OTHER]),
    ("too long a salt", "acquires", "namespace.salt", [GOOD._replace(namespace=Namespace("model", "", "s" * 257))]),
    ("another model", "acquires", "namespace.model", [GOOD._replace(namespace=Namespace("other"))]),
    ("malformed", "acquires", "namespace.salt", [BadItem(GOOD.sequence_id, "namespace.salt", "is too long")]),
    ("publish of nobody", "publishes", "sequence_id", [Publish(UNKNOWN, b"", 0)]),
    ("publish twice", "publishes", "sequence_id", [Publish(A, b"", 5), Publish(A, b"", 5)]),
    ("publish beyond its tokens", "publishes", "computed_tokens", [Publish(A, b"", 6)]),
    ("publish beyond the grant", "publishes", "computed_tokens", [Publish(A, pack(span(6, 9)), 9)]),
    ("publish backwards", "publishes", "computed_tokens", [Publish(A, b"", 2)]),
    ("publish torn tokens", "publishes", "tokens", [Publish(A, b"ab", 5)]),
    ("publish negative", "publishes", "computed_tokens", [Publish(A, b"", -1)]),
    ("release of nobody", "releases", "sequence_id", [Release(UNKNOWN, FINISHED)]),
    ("release twice", "releases", "sequence_id", [Release(B, FINISHED), Release(B, FINISHED)]),
    ("release between boundaries", "releases", "rolling_tokens", [Release(A, FINISHED, 3)]),
    ("extend of nobody", "extends", "sequence_id", [Extend(UNKNOWN, 4)]),
    ("extend negative", "extends", "num_tokens", [Extend(A, -1)]),
    ("extend twice", "extends", "sequence_id", [Extend(A, 6), Extend(A, 6)]),
]


@pytest.mark.parametrize(("name", "field", "items"), [row[1:] for row in ITEMS], ids=[row[0] for row in ITEMS])
def test_a_bad_item_is_refused_alone(name: str, field: str, items: list[Any]) -> None:
    """Its field is named, nothing else of the step is held up, and the books balance."""
    worker, twin = busy(), busy()
    fields: dict[str, list[Any]] = {"publishes": [], "releases": [Release(C, FINISHED)], "acquires": [GOOD_TOO]}
    reply = worker.raw_step(**{**fields, name: [*fields.get(name, []), *items]})
    at = len(fields.get(name, [])) + len(items) - 1
    (refusal,) = [refusal for refusal in reply.refusals if refusal.reason is RefusalReason.INVALID]
    assert (refusal.sequence_id, refusal.field) == (items[-1].sequence_id, f"step.{name}[{at}].{field}")
    assert refusal.detail
    twin.raw_step(**{**fields, name: [*fields.get(name, []), *items[:-1]]})
    assert worker.world.snapshot() == twin.world.snapshot()
    assert [grant.sequence_id for grant in reply.grants][:1] == [GOOD_TOO.sequence_id]
    worker.world.settle()
    assert worker.step().step_id == worker.step_id


def test_items_of_a_sequence_that_its_own_step_released_are_refused() -> None:
    worker = busy()
    reply = worker.raw_step(releases=[Release(A, FINISHED)], extends=[Extend(A, 6)])
    assert [refusal.field for refusal in reply.refusals] == ["step.extends[0].sequence_id"]


@pytest.mark.parametrize("ack", [Ack(TicketId(77), 0, DONE)])
def test_an_ack_of_nothing_ends_the_stream_and_changes_nothing(ack: Ack) -> None:
    worker = busy()
    before = worker.world.snapshot()
    with pytest.raises(UnknownTicket) as raised:
        worker.step(acks=[ack], acquires=[GOOD])
    assert raised.value.field == "step.acks[0].ticket"
    assert worker.world.snapshot() == before
    assert worker.step().step_id == worker.step_id


def hello(**changes: Any) -> Hello:
    good = Hello(WorkerId("w9"), "127.0.0.1:9", "i0", FINGERPRINT, 2, (full(4),))
    return good._replace(**changes)


HELLOS: list[tuple[str, Hello]] = [
    ("no worker id", hello(worker_id=WorkerId(""))),
    ("no incarnation", hello(incarnation="")),
    ("no fingerprint", hello(fingerprint=b"")),
    ("no page tokens", hello(page_tokens=0)),
    ("negative page tokens", hello(page_tokens=-16)),
    ("no groups", hello(groups=())),
    ("equal names", hello(groups=(full(4), full(4)))),
    ("empty pool", hello(groups=(full(0),))),
    ("window of nothing", hello(groups=(full(4), window(4, 0)))),
    ("window on full", hello(groups=(GroupSpec("g", full(1).kind, 4, 1, 8),))),
    ("one slot of a state", hello(groups=(full(4), state(1)))),
    ("an interval that is no boundary", hello(groups=(full(4), state(4, interval=3)))),
    ("a negative interval", hello(groups=(full(4), state(4, interval=-2)))),
    ("an interval of a full group", hello(groups=(full(4)._replace(state_interval_tokens=2),))),
    ("page ids beyond 32 bits", hello(groups=(full(2**32),))),
    ("no ranks", hello(num_ranks=0)),
]


@pytest.mark.parametrize("bad", [row[1] for row in HELLOS], ids=[row[0] for row in HELLOS])
def test_a_bad_hello_is_refused(bad: Hello) -> None:
    world = World()
    error = world.unchanged(world.manager.hello, bad, world.now_ms)
    assert isinstance(error, InvalidInput) and error.field
    assert world.manager.stats().workers == ()


def test_a_known_incarnation_may_not_change_its_groups() -> None:
    worker = busy()
    worker.groups = (full(24), window(24, 4), state(25))
    error = worker.world.unchanged(worker.hello)
    assert isinstance(error, InvalidInput)


def test_a_prompt_longer_than_the_pool_never_fits() -> None:
    worker = busy()
    assert worker.refused(span(1, 49)).reason == RefusalReason.NEVER_FITS
    assert worker.refused(span(1, 48), reserve=1).reason == RefusalReason.NEVER_FITS
    assert worker.refused(span(1, 48)).reason == RefusalReason.NO_ROOM


@pytest.mark.parametrize(
    ("acquires", "field"),
    [
        ([GOOD, GOOD_TOO, OTHER], "step.acquires[2].sequence_id"),
        ([GOOD, OTHER._replace(tokens=pack(span(1, 11)))], "step.acquires[1].tokens"),
        ([GOOD, OTHER._replace(kept_tokens=7)], "step.acquires[1].tokens"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_alone(acquires: list[Acquire], field: str) -> None:
    world = World(max_live_sequences=2, max_sequence_tokens=10)
    worker = FakeWorker(world, [full(64)], 2)
    reply = worker.raw_step(acquires=acquires)
    assert [(r.reason, r.field) for r in reply.refusals] == [(RefusalReason.INVALID, field)]
    assert len(reply.grants) == len(acquires) - 1


def test_a_sequence_cannot_grow_beyond_the_limit() -> None:
    worker = FakeWorker(World(max_sequence_tokens=10), [full(64)], 2)
    live = worker.start(span(1, 9))
    worker.launch(live)
    reply = worker.raw_step(publishes=[Publish(SequenceId(live.id), pack([1, 2]), 9)])
    assert [refusal.field for refusal in reply.refusals] == ["step.publishes[0].tokens"]
    reply = worker.raw_step(extends=[Extend(SequenceId(live.id), 11)])
    assert [refusal.field for refusal in reply.refusals] == ["step.extends[0].num_tokens"]
    worker.publish(live)


def adopts() -> dict[str, Callable[[Adopt], Adopt]]:
    def table(pages: list[int]) -> tuple[GroupPages, ...]:
        return (GroupPages(0, 0, b"".join(p.to_bytes(4, "little") for p in pages)),)

    return {
        "computed beyond tokens": lambda a: a._replace(computed_tokens=99),
        "negative computed": lambda a: a._replace(computed_tokens=-1),
        "torn tokens": lambda a: a._replace(tokens=b"abc"),
        "no tokens": lambda a: a._replace(tokens=b""),
        "page outside the pool": lambda a: a._replace(tables=table([1, 2, 9])),
        "page twice": lambda a: a._replace(tables=table([1, 1, 2])),
        "hole below computed": lambda a: a._replace(tables=table([1, 0, 2])),
        "too few pages": lambda a: a._replace(tables=table([1])),
        "unknown group": lambda a: a._replace(tables=(GroupPages(7, 0, b""),)),
        "group twice": lambda a: a._replace(tables=a.tables + a.tables),
        "torn table": lambda a: a._replace(tables=(GroupPages(0, 0, b"abc"),)),
        "slots for no state group": lambda a: a._replace(working=(StateSlot(0, 0, 1),)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", adopts())
def test_a_bad_adopt_is_refused(name: str) -> None:
    worker = FakeWorker(World(), [full(8)], 2)
    live = worker.start(span(1, 6))
    worker.launch(live, 5)
    worker.world.new_manager()
    worker.hello()
    bad = adopts()[name](worker.adopt_of(live))
    before = worker.world.snapshot()
    (refusal,) = worker.raw_step(adopts=[bad]).refusals
    assert (refusal.sequence_id, refusal.reason) == (live.id, RefusalReason.INVALID)
    assert refusal.field.startswith("step.adopts[0].")
    assert worker.world.snapshot() == before
    assert not isinstance(worker.adopt(live), Refusal)


def test_full_groups_go_in_step_in_an_adopt_too() -> None:
    worker = FakeWorker(World(), [full(8), full(8, "second")], 2)
    live = worker.start(span(1, 6))
    worker.launch(live, 5)
    worker.world.new_manager()
    worker.hello()
    good = worker.adopt_of(live)
    bad = good._replace(tables=(good.tables[0], good.tables[1]._replace(page_ids=pack([1, 2, 3, 4]))))
    before = worker.world.snapshot()
    (refusal,) = worker.raw_step(adopts=[bad]).refusals
    assert (refusal.reason, refusal.field) == (RefusalReason.INVALID, "step.adopts[0].tables")
    assert worker.world.snapshot() == before
    assert not isinstance(worker.adopt(live), Refusal)


@pytest.mark.parametrize("call", [CacheManager.match, explain_at_once, CacheManager.pin])
def test_unary_calls_check_their_tokens(call: Callable[..., object]) -> None:
    world = busy().world
    for tokens in (b"abc", b""):
        rest = (1000, world.now_ms) if call is CacheManager.pin else (WorkerId("w0"),)
        assert isinstance(world.unchanged(call, world.manager, NS, tokens, *rest), InvalidInput)
    if call is CacheManager.pin:
        assert isinstance(world.unchanged(world.manager.pin, NS, pack([1, 2]), -1, world.now_ms), InvalidInput)


def test_namespaces_of_nobody_leave_nothing_behind() -> None:
    worker = busy()
    before = worker.world.snapshot()
    for i in range(50):
        stranger = Namespace("model", "", f"salt {i}")
        worker.world.manager.match(stranger, pack([1, 2, 3]), worker.id)
        explain_at_once(worker.world.manager, stranger, pack([1, 2, 3]), worker.id)
        worker.world.manager.pin(stranger, pack([1, 2, 3]), 5, worker.world.now_ms)
    worker.world.settle()
    assert worker.world.snapshot() == before
