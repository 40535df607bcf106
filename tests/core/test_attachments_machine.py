"""A Hypothesis state machine over attached engines, judged by trying every boundary, by the store, and by the audit.

STEMCACHE_HYPOTHESIS=thorough runs longer.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_service.core.attachments.messages import (
    Commit,
    ExplainedPath,
    Found,
    GroupRange,
    LeaseEnd,
    Path,
    Reserved,
    WrittenPages,
)
from cache_service.core.base.errors import Detached, LeasesInScope
from session.errors import TooMany
from session.words import MissReason, Namespace, TransferStatus
from tests.core import audit
from tests.core.at_once import clear_at_once, to_the_end
from tests.core.attached import (
    DONE,
    FAILED,
    LAYOUTS,
    MISSING,
    PAGE_BYTES,
    TIER,
    Engine,
    Stage,
    expected,
    needed,
    path,
    token_path,
)
from tests.examples import examples

LEASE_MS, TICKET_MS, IDLE_MS = 300, 500, 1_500
SALTS = ("", "a")
INDEX = st.integers(0, 5)
# Two letters in paths of up to seven pages: prefixes meet often.
PATHS = st.builds(
    lambda names, salt, by_tokens: (
        token_path([ord(name) for name in names for _ in range(4)], salt) if by_tokens else path(names, salt)
    ),
    st.lists(st.sampled_from("xy"), min_size=1, max_size=7),
    st.sampled_from(SALTS),
    st.booleans(),
)


class Open:
    """A ticket as its engine knows it."""

    def __init__(self, engine: Engine, reserved: Reserved) -> None:
        self.engine, self.reserved, self.ranks_done = engine, reserved, set[int]()


class Machine(RuleBasedStateMachine):
    """Engines of one store: some share their pages, others do not."""

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        self.quota_pages = data.draw(st.sampled_from([5, 8, 14, 1_000]))
        self.stage = Stage(
            host_quota_bytes=self.quota_pages * PAGE_BYTES,
            host_lease_ms=LEASE_MS,
            max_spill_ms=TICKET_MS,
            attachment_idle_ms=IDLE_MS,
            max_open_tickets=3,
            max_live_sequences=4,
            breaker_failures=2,
            breaker_ms=200,
        )
        self.groups = data.draw(st.sampled_from(LAYOUTS))
        self.ranks = data.draw(st.sampled_from([1, 1, 2]))
        self.engines = [self.attach(), self.attach()]
        self.leases: list[tuple[Engine, Found]] = []
        self.tickets: list[Open] = []
        self.saved: list[Path] = []

    def attach(self) -> Engine:
        return self.stage.engine(*self.groups, ranks=self.ranks)

    def engine(self, at: int) -> Engine:
        """One that is attached; it attaches again where that has ended."""
        number = at % len(self.engines)
        try:
            self.engines[number].attachment()
        except Detached:
            self.engines[number] = self.attach()
        return self.engines[number]

    def has(self, engine: Engine, asked: Path) -> Any:
        """Whether the index holds a group of a page, told by its rows alone."""
        attachment = engine.attachment()
        hashes = attachment.hashes(asked)
        index, fingerprint = attachment.view.index, attachment.view.fingerprint
        floor = index.cleared.floor(hashes.digest)

        def holds(group: int, page: int) -> bool:
            row = index.rows.get(fingerprint + hashes.run(page, page + 1)[0])
            return row is not None and row.stamp > floor and bool(row.groups >> group & 1)

        return hashes, holds

    @rule(at=INDEX, asked=PATHS, local=st.integers(0, 7), lease=st.booleans())
    def lookup(self, at: int, asked: Path, local: int, lease: bool) -> None:
        engine = self.engine(at)
        hashes, has = self.has(engine, asked)
        local = min(local, hashes.num_pages) if local < 5 else 0
        is_open = engine.attachment().is_paused
        try:
            found = engine.lookup(asked, local, lease)
        except TooMany:
            assert len(engine.attachment().leases) == 4
            return
        if is_open:
            assert found.breaker_open and found.usable_pages == local and not found.pages
            return
        limit = max(hashes.reusable_pages, local)
        assert (found.usable_pages, found.matched_pages) == expected(self.groups, has, local, limit)
        assert engine.is_written(found), "a lookup names a page that nobody wrote"
        named = {(one.group, page) for one in found.pages for page in one.pages}
        assert named == needed(self.groups, local, found.usable_pages)
        assert bool(found.pages) == (found.usable_pages > local) and bool(found.lease) == (lease and bool(found.pages))
        if found.lease:
            self.leases.append((engine, found))

    @rule(at=INDEX, asked=PATHS)
    def explain(self, at: int, asked: Path) -> None:
        """Says what a Lookup finds, and of each group what the rows say."""
        engine = self.engine(at)
        hashes, has = self.has(engine, asked)
        limit, is_open = hashes.reusable_pages, engine.attachment().is_paused
        question = ExplainedPath(engine.attached.attachment, "model", asked)
        (told,) = to_the_end(self.stage.manager.attachments.explaining(question, self.stage.now_ms))
        self.stage.settle()
        assert told.miss_reason is not MissReason.UNSPECIFIED and told.notes[0]
        if not is_open:
            assert (told.usable_pages, told.matched_pages) == expected(self.groups, has, 0, limit)
        for number, one in enumerate(told.groups):
            there = [has(number, page) for page in range(limit)]
            assert (one.resident_pages, one.leading_pages) == (sum(there), [*there, False].index(False))
            assert one.missing_page is None or not there[one.missing_page]
            assert (one.miss_reason is MissReason.NONE) == (one.missing_page is None)

    @rule(at=INDEX, asked=PATHS, parts=st.lists(st.tuples(INDEX, INDEX, st.integers(1, 7)), min_size=1, max_size=4))
    def reserve(self, at: int, asked: Path, parts: list[tuple[int, int, int]]) -> None:
        engine = self.engine(at)
        num_pages = engine.attachment().hashes(asked).num_pages
        ranges = [GroupRange(group % len(self.groups), first % num_pages, count) for group, first, count in parts]
        ranges = [one._replace(num_pages=min(one.num_pages, num_pages - one.first_page)) for one in ranges]
        if len(engine.attachment().tickets) == 3:
            with pytest.raises(TooMany):
                engine.reserve(asked, *ranges)
            return
        reserved = engine.reserve(asked, *ranges)
        index = engine.attachment().view.index
        if reserved.ticket:
            assert index.quota.reserved_bytes + index.quota.held_bytes <= index.quota.max_bytes
            self.tickets.append(Open(engine, reserved))
            self.saved.append(asked)

    @rule(at=INDEX, asked=PATHS, first=st.integers(0, 3))
    def save(self, at: int, asked: Path, first: int) -> None:
        """From reserve to the last rank's commit: most of what an engine does."""
        engine = self.engine(at)
        num_pages = engine.attachment().hashes(asked).num_pages
        if first < num_pages and len(engine.attachment().tickets) < 3:
            engine.save(asked, first, num_pages)
            self.saved.append(asked)

    @precondition(lambda self: self.saved)
    @rule(at=INDEX, which=INDEX, local=st.integers(0, 2), again=st.booleans())
    def look_for_saved(self, at: int, which: int, local: int, again: bool) -> None:
        for _ in range(1 + again):
            self.lookup(at, self.saved[-1 - which % len(self.saved)], local, True)

    @precondition(lambda self: self.tickets)
    @rule(at=INDEX, rank=INDEX, most=st.integers(0, 7), status=st.sampled_from([DONE, DONE, DONE, FAILED]))
    def commit(self, at: int, rank: int, most: int, status: TransferStatus) -> None:
        ticket = self.tickets[at % len(self.tickets)]
        engine, rank = ticket.engine, rank % self.ranks
        written = []
        for one in ticket.reserved.pages:
            count = min(most, len(one.pages))
            self.stage.store.update(engine.names([one._replace(page_hashes=one.page_hashes[:count])], rank))
            written.append(WrittenPages(one.group, count, count * PAGE_BYTES))
        try:
            committed = engine.commit(Commit(ticket.reserved.ticket, rank, status, tuple(written)))
        except Detached:
            self.tickets.remove(ticket)
            return
        ticket.ranks_done.add(rank)
        if not committed.is_open or len(ticket.ranks_done) == self.ranks:
            self.tickets.remove(ticket)
        else:
            assert not committed.num_findable, "a rank is lacking"

    @precondition(lambda self: self.leases)
    @rule(at=INDEX, done=st.integers(0, 7), status=st.sampled_from([DONE, DONE, DONE, MISSING, FAILED]))
    def release(self, at: int, done: int, status: TransferStatus) -> None:
        """As its engine says, for good or bad."""
        engine, found = self.leases.pop(at % len(self.leases))
        try:
            lease = engine.attachment().leases.get(found.lease)
        except Detached:
            return
        if lease is None:
            assert engine.release(LeaseEnd(found.lease, DONE)) == 0
            return
        assert engine.release(LeaseEnd(found.lease, status, min(done, len(lease.hashes)))) == 1
        if status is MISSING:  # its row is dropped, whatever other leases hold it
            self.leases.clear()

    @rule(passed_ms=st.sampled_from([10, 10, 10, 200, 400, 1_600]))
    def tick(self, passed_ms: int) -> None:
        self.stage.tick(passed_ms)
        for attachment in self.stage.manager.attachments.all.values():
            now_ms = self.stage.now_ms
            assert all(lease.until_ms > now_ms for lease in attachment.leases.values())
            assert all(writing.until_ms > now_ms for writing in attachment.tickets.values())

    @rule(salt=st.sampled_from([None, *SALTS]), unused_only=st.booleans(), chance=INDEX)
    def clear(self, salt: str | None, unused_only: bool, chance: int) -> None:
        if chance > 2:
            return
        namespace = None if salt is None else Namespace("model", "", salt)
        is_held = self.stage.manager.attachments.is_in_scope(namespace)
        if is_held and not unused_only:
            with pytest.raises(LeasesInScope):
                clear_at_once(self.stage.manager, namespace, unused_only)
            return
        clear_at_once(self.stage.manager, namespace, unused_only)
        self.stage.settle()
        if unused_only:  # its readers find nothing from now on
            self.leases.clear()

    @rule(chance=INDEX)
    def lose_the_store(self, chance: int) -> None:
        if chance:
            return
        self.stage.manager.host_lost(TIER)
        self.stage.store.clear()
        self.stage.settle()
        assert not self.stage.manager.attachments.all

    @invariant()
    def what_a_lease_holds_is_there(self) -> None:
        if hasattr(self, "stage"):
            attachments = self.stage.manager.attachments.all
            for engine, found in self.leases:
                attachment = attachments.get(engine.attached.attachment)
                if attachment is not None and found.lease in attachment.leases:
                    assert engine.is_written(found), "a value went while a lease held it"

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.tick(IDLE_MS)
            audit.check(self.stage.manager)
            index = self.stage.manager.tiers.shared[TIER]
            assert (index.quota.num_held, index.quota.held_bytes, index.quota.reserved_bytes, index.pending) == (
                0,
                0,
                0,
                {},
            )


TestAttachments = Machine.TestCase
TestAttachments.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
