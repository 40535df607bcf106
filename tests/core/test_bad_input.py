"""What a caller did wrong: an error of the right kind that names the field, and nothing changed.

Knows nothing beyond the driver. Each row is one wrong thing in an otherwise good call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cache_service.core.errors import (
    CacheError,
    DuplicateSequence,
    InvalidInput,
    TooMany,
    UnknownSequence,
    UnknownTicket,
)
from cache_service.core.types import (
    Ack,
    Acquire,
    Adopt,
    Extend,
    GroupPages,
    GroupSpec,
    Hello,
    Namespace,
    Publish,
    Refusal,
    RefusalReason,
    Release,
    SequenceId,
    SnapshotSlot,
    TicketId,
    WorkerId,
)
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import span
from tests.core.world import DONE, FINGERPRINT, FINISHED, NS, World, full, pack, state, window

A, UNKNOWN = SequenceId(1), SequenceId(404)
GOOD = Acquire(SequenceId(50), NS, pack(span(1, 4)))


def busy() -> FakeWorker:
    """Sequence 1 has prefilled 5 of its 5 tokens and holds three pages of 2."""
    worker = FakeWorker(World(watch=True), [full(8), window(8, 4), state(8)], 2)
    live = worker.start(span(1, 5), sequence_id=1)
    worker.prefill(live)
    return worker


STEPS: list[tuple[str, dict[str, Any], type[CacheError]]] = [
    ("torn tokens", {"acquires": [GOOD._replace(tokens=b"abc")]}, InvalidInput),
    ("no tokens", {"acquires": [GOOD._replace(tokens=b"")]}, InvalidInput),
    ("negative reserve", {"acquires": [GOOD._replace(reserve_pages=-1)]}, InvalidInput),
    ("negative chunk", {"acquires": [GOOD._replace(chunk_tokens=-1)]}, InvalidInput),
    ("live sequence", {"acquires": [GOOD._replace(sequence_id=A)]}, DuplicateSequence),
    ("twice in a step", {"acquires": [GOOD, GOOD]}, DuplicateSequence),
    ("publish of nobody", {"publishes": [Publish(UNKNOWN, b"", 0)]}, UnknownSequence),
    ("publish beyond its tokens", {"publishes": [Publish(A, b"", 6)]}, InvalidInput),
    ("publish beyond the grant", {"publishes": [Publish(A, pack(span(6, 9)), 9)]}, InvalidInput),
    ("publish backwards", {"publishes": [Publish(A, b"", 2)]}, InvalidInput),
    ("publish torn tokens", {"publishes": [Publish(A, b"ab", 5)]}, InvalidInput),
    ("publish negative", {"publishes": [Publish(A, b"", -1)]}, InvalidInput),
    ("release of nobody", {"releases": [Release(UNKNOWN, FINISHED)]}, UnknownSequence),
    ("release twice", {"releases": [Release(A, FINISHED), Release(A, FINISHED)]}, CacheError),
    ("extend of nobody", {"extends": [Extend(UNKNOWN, 4)]}, UnknownSequence),
    ("extend negative", {"extends": [Extend(A, -1)]}, InvalidInput),
    ("extend after release", {"releases": [Release(A, FINISHED)], "extends": [Extend(A, 6)]}, CacheError),
    ("unknown ticket", {"acks": [Ack(TicketId(77), 0, DONE)]}, UnknownTicket),
    ("late fault", {"publishes": [Publish(A, pack([6]), 5)], "acquires": [GOOD._replace(tokens=b"a")]}, InvalidInput),
    ("good then bad", {"acquires": [GOOD, GOOD._replace(sequence_id=SequenceId(51), tokens=b"")]}, InvalidInput),
]


@pytest.mark.parametrize(("fields", "kind"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS])
def test_a_bad_step_is_refused_whole(fields: dict[str, Any], kind: type[CacheError]) -> None:
    worker = busy()
    before = worker.world.snapshot()
    with pytest.raises(kind) as raised:
        worker.step(**fields)
    assert raised.value.field and raised.value.reason
    assert worker.world.snapshot() == before
    worker.world.settle()
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
    worker.groups = (full(8), window(8, 4), state(9))
    error = worker.world.unchanged(worker.hello)
    assert isinstance(error, InvalidInput)


def test_a_prompt_longer_than_the_pool_never_fits() -> None:
    worker = busy()
    assert worker.refused(span(1, 17)).reason == RefusalReason.NEVER_FITS
    assert worker.refused(span(1, 16), reserve=1).reason == RefusalReason.NEVER_FITS
    assert worker.refused(span(1, 16)).reason == RefusalReason.NO_ROOM


def test_limits_answer_too_many() -> None:
    world = World(max_live_sequences=2, max_prompt_tokens=10)
    worker = FakeWorker(world, [full(64)], 2)
    worker.start([1])
    worker.start([1])
    with pytest.raises(TooMany):
        worker.submit([1])
    with pytest.raises(CacheError):
        worker.submit(span(1, 11))


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
        "slots for no state group": lambda a: a._replace(working=(SnapshotSlot(0, 0, 1),)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", adopts())
def test_a_bad_adopt_is_refused(name: str) -> None:
    worker = FakeWorker(World(), [full(8)], 2)
    live = worker.start(span(1, 6))
    worker.launch(live, 5)
    worker.world.new_manager()
    worker.step_id = 0
    worker.hello()
    bad = adopts()[name](worker.adopt_of(live))
    error = worker.world.unchanged(worker.world.manager.adopt, worker.id, bad, worker.world.now_ms)
    assert isinstance(error, InvalidInput) and error.field
    assert not isinstance(worker.adopt(live), Refusal)


@pytest.mark.parametrize("call", ["match", "explain", "pin"])
def test_unary_calls_check_their_tokens(call: str) -> None:
    world = busy().world
    for tokens in (b"abc", b""):
        rest = (1000, world.now_ms) if call == "pin" else (WorkerId("w0"),)
        assert isinstance(world.unchanged(getattr(world.manager, call), NS, tokens, *rest), InvalidInput)
    if call == "pin":
        assert isinstance(world.unchanged(world.manager.pin, NS, pack([1, 2]), -1, world.now_ms), InvalidInput)


def test_namespaces_of_nobody_leave_nothing_behind() -> None:
    worker = busy()
    before = worker.world.snapshot()
    for i in range(50):
        stranger = Namespace("model", "", f"salt {i}")
        worker.world.manager.match(stranger, pack([1, 2, 3]), worker.id)
        worker.world.manager.explain(stranger, pack([1, 2, 3]), worker.id)
        worker.world.manager.pin(stranger, pack([1, 2, 3]), 5, worker.world.now_ms)
    worker.world.settle()
    assert worker.world.snapshot() == before
