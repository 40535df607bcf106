"""A fake worker on a real manager: it launches, publishes, moves pages in its shadow, and checks each page it is given.

Knows nothing of how the manager works: only steps, grants, orders and contents. The simulation uses it too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cache_service.core.errors import CacheError
from cache_service.core.types import (
    Ack,
    Acquire,
    Adopt,
    Extend,
    ExtendGrant,
    Grant,
    GroupKind,
    GroupPages,
    GroupSpec,
    Hello,
    HostTierKind,
    Namespace,
    PageId,
    Publish,
    Rates,
    Refusal,
    Release,
    ReleaseReason,
    Remap,
    SequenceId,
    SnapshotSlot,
    Step,
    StepReply,
    Transfer,
    TransferStatus,
    Welcome,
    WorkerId,
)
from tests.core.launcher import Launcher
from tests.core.shadow import Shadow, Value, marks_of
from tests.core.world import DONE, FAILED, FINGERPRINT, FINISHED, MISSING, NS, Live, World, ids, pack


class FakeWorker(Launcher):
    """An engine without a model. Launches run at once; whether they were reported is the caller's choice."""

    def __init__(
        self,
        world: World,
        groups: Sequence[GroupSpec],
        page_tokens: int = 4,
        worker_id: str = "w0",
        incarnation: str = "i0",
        host_tier: HostTierKind = HostTierKind.NONE,
        host_tier_id: str = "",
        num_ranks: int = 1,
    ) -> None:
        self.world = world
        super().__init__(groups, page_tokens)
        self.id = WorkerId(worker_id)
        self.incarnation = incarnation
        self.host_tier, self.host_tier_id, self.num_ranks = host_tier, host_tier_id, num_ranks
        self.live: dict[int, Live] = {}
        self.spills: list[tuple[Transfer, dict[bytes, Value]]] = []
        self.orphans: dict[int, Transfer] = {}
        self.step_id = 0
        self.connected = False
        self.rates: Rates | None = None
        self.last_step: Step | None = None
        self.loses_reply: Callable[[], bool] = lambda: False
        world.workers[worker_id] = self
        self.hello()

    # -- session -----------------------------------------------------------------------------------------------

    def hello(self) -> Welcome:
        live = tuple(SequenceId(i) for i in self.live)
        hello = Hello(
            self.id,
            "127.0.0.1:1",
            self.incarnation,
            FINGERPRINT,
            self.page_tokens,
            self.groups,
            live,
            self.host_tier,
            self.host_tier_id,
            self.num_ranks,
        )
        welcome = self.world.manager.hello(hello, self.world.now_ms)
        self.connected = True
        self.world.settle()
        return welcome

    @property
    def store(self) -> dict[bytes, Value]:
        name = self.host_tier_id if self.host_tier == HostTierKind.SHARED else f"private {self.id} {self.incarnation}"
        return self.world.stores.setdefault(name, {})

    def take_orders(self) -> None:
        for order in self.world.manager.take_orders(self.id):
            self.spills.append((order, self._expected(order)))

    def _expected(self, order: Transfer) -> dict[bytes, Value]:
        """What the order's pages hold now; it must be the same when the mover reads them, however late."""
        values: dict[bytes, Value] = {}
        for part in order.groups:
            assert len(part.keys) == order.num_pages == len(ids(part.page_ids))
            for page, key in zip(ids(part.page_ids), part.keys, strict=True):
                assert bool(page) == bool(key), "a page without a key, or a key without a page"
                if page:
                    value = self.shadow.value(part.group, page)
                    assert "poison" not in value, "a spill order for a page that was never written"
                    assert self.world.value_of_key.setdefault(key, value) == value, "one key, two contents"
                    values[key] = value
        return values

    def step(self, **fields: Any) -> StepReply:
        """One Step; on a CacheError nothing may have changed and the id is used again."""
        step = Step(self.step_id + 1, **{name: tuple(value) for name, value in fields.items()}, rates=self.rates)
        before = self.world.snapshot()
        try:
            reply = self.world.manager.step(self.id, step, self.world.now_ms)
        except CacheError:
            assert self.world.snapshot() == before, "a failed step changed something"
            raise
        if self.loses_reply():
            self._ask_again(step, reply)
            before = None  # a new stream voids orders
        self.step_id += 1
        self.last_step = step
        assert reply.step_id == self.step_id
        for remap in reply.remaps:
            self._apply_remap(remap)
        wanted = {extend.sequence_id: extend.num_tokens for extend in step.extends}
        for extended in reply.extends:
            self._apply_extend(extended, wanted[extended.sequence_id])
        self._after(before, step, reply)
        return reply

    def _ask_again(self, step: Step, reply: StepReply) -> None:
        """The stream broke before the reply came: the same step, on a new stream, has the same answer."""
        self.disconnect()
        self.spills.clear()
        assert self.hello().last_step_id == step.step_id
        assert self.world.manager.step(self.id, step, self.world.now_ms) == reply

    def _after(self, before: object, step: Step, reply: StepReply) -> None:
        only_asks = not (step.acks or step.publishes or step.releases or step.rates)
        if before is not None and only_asks and not reply.grants and not reply.extends and reply.refusals:
            assert self.world.snapshot() == before, "a refusal changed something"
        self.world.settle()

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        namespace: Namespace = NS,
        *,
        chunk: int = 0,
        reserve: int = 0,
        priority: int = 0,
        sequence_id: int | None = None,
    ) -> Live | Refusal:
        if sequence_id is None:
            self.world.next_sequence += 1
            sequence_id = self.world.next_sequence
        self.world.next_sequence = max(self.world.next_sequence, sequence_id)
        acquire = Acquire(SequenceId(sequence_id), namespace, pack(tokens), reserve, chunk, priority)
        reply = self.step(acquires=[acquire])
        return self.taken(acquire, reply)

    def taken(self, acquire: Acquire, reply: StepReply) -> Live | Refusal:
        """The answer to one of a Step's acquires, applied."""
        for refusal in reply.refusals:
            if refusal.sequence_id == acquire.sequence_id:
                return refusal
        (grant,) = [g for g in reply.grants if g.sequence_id == acquire.sequence_id]
        tokens = list(array("i", acquire.tokens))
        live = Live(
            acquire.sequence_id,
            acquire.namespace,
            tokens,
            marks_of(acquire.namespace, tokens),
            len(tokens),
            len(tokens),
            [{} for _ in self.groups],
            grant,
            priority=acquire.priority,
            chunk=acquire.chunk_tokens,
        )
        self.live[live.id] = live
        self.apply_grant(live, grant)
        return live

    def start(self, tokens: Sequence[int], namespace: Namespace = NS, **options: Any) -> Live:
        """Submit a prompt that must be granted."""
        live = self.submit(tokens, namespace, **options)
        assert isinstance(live, Live), live
        return live

    def refused(self, tokens: Sequence[int], namespace: Namespace = NS, **options: Any) -> Refusal:
        refusal = self.submit(tokens, namespace, **options)
        assert isinstance(refusal, Refusal), refusal
        return refusal

    def apply_grant(self, live: Live, grant: Grant) -> None:
        assert grant.usable_tokens % self.page_tokens == 0
        assert grant.usable_tokens < len(live.tokens), "at least one token must be computed"
        live.grant, live.fetch = grant, grant.fetch
        proven = grant.usable_tokens // self.page_tokens
        if grant.fetch is not None:
            proven = grant.fetch.first_page + grant.fetch.num_pages
            for part in grant.fetch.groups:
                for page in filter(None, ids(part.page_ids)):
                    self.shadow.poison(part.group, page)
        if grant.fetch is None:
            assert grant.cached_tokens + grant.fetched_tokens == grant.usable_tokens
        live.tables = [{} for _ in self.groups]
        for pages in grant.tables:
            self._set_pages(live, pages)
            if self.groups[pages.group].kind != GroupKind.STATE:
                for number, page in live.tables[pages.group].items():
                    if number >= proven:
                        self.shadow.poison(pages.group, page)
        self._set_slots(live, grant)
        live.computed = live.reported = grant.usable_tokens if grant.fetch is None else grant.cached_tokens
        live.restored, live.rolled = False, 0
        live.room = grant.usable_tokens + (live.chunk or len(live.tokens))
        if grant.fetch is None:
            self.check_grant(live)

    def _set_slots(self, live: Live, grant: Grant) -> None:
        live.working = {s.group: s.slot for s in grant.working}
        live.rolling = {s.group: s.slot for s in grant.rolling}
        live.leave = {}
        self._set_leave(live, grant.leave)
        for slots in (live.working, live.rolling):
            for group, slot in slots.items():
                self.shadow.poison(group, slot)

    def _set_leave(self, live: Live, leave: Iterable[SnapshotSlot]) -> None:
        for slot in leave:
            assert slot.boundary_tokens % self.page_tokens == 0 and slot.slot
            assert slot.boundary_tokens > live.grant.usable_tokens or live.fetch
            live.leave[slot.group, slot.boundary_tokens] = slot.slot
            self.shadow.poison(slot.group, slot.slot)

    def _set_pages(self, live: Live, pages: GroupPages) -> list[tuple[int, int]]:
        new = [(pages.first_page + i, page) for i, page in enumerate(ids(pages.page_ids)) if page]
        live.tables[pages.group].update(new)
        for _, page in new:
            assert 1 <= page <= self.groups[pages.group].num_pages, "a page id outside its pool"
        return new

    def _apply_extend(self, extended: ExtendGrant, wanted: int) -> None:
        live = self.live[extended.sequence_id]
        live.room = max(live.room, wanted)
        for pages in extended.pages:
            for _, page in self._set_pages(live, pages):
                self.shadow.poison(pages.group, page)
        self._set_leave(live, extended.leave)

    def _apply_remap(self, remap: Remap) -> None:
        live = self.live.get(remap.sequence_id)
        if live is None:
            return
        for pages in remap.pages:
            for number, _page in self._set_pages(live, pages):
                self._check_page(live, pages.group, number, "a remap")

    # -- reports -----------------------------------------------------------------------------------------------

    def publish_of(self, live: Live, computed: int | None = None, known: int | None = None) -> Publish:
        computed = live.computed if computed is None else computed
        known = max(live.known_len, computed, len(live.tokens) if known is None else known)
        return Publish(SequenceId(live.id), pack(live.tokens[live.known_len : known]), computed)

    def published(self, live: Live, publish: Publish) -> None:
        live.known_len += len(publish.tokens) // 4
        live.reported = publish.computed_tokens

    def publish(self, live: Live, computed: int | None = None, known: int | None = None) -> StepReply:
        publish = self.publish_of(live, computed, known)
        reply = self.step(publishes=[publish])
        self.published(live, publish)
        return reply

    def extend(self, live: Live, num_tokens: int) -> bool:
        """Ask for room; False when it was refused."""
        reply = self.step(extends=[Extend(SequenceId(live.id), num_tokens)])
        granted = any(e.sequence_id == live.id for e in reply.extends)
        assert granted != any(r.sequence_id == live.id for r in reply.refusals)
        return granted

    def release(self, live: Live, reason: ReleaseReason = FINISHED) -> StepReply:
        reply = self.step(releases=[Release(SequenceId(live.id), reason)])
        self.forget(live)
        return reply

    def forget(self, live: Live) -> None:
        live.ended = True
        if live.fetch is not None:
            self.orphans[live.fetch.ticket] = live.fetch
        self.live.pop(live.id, None)

    def prefill(self, live: Live, chunk: int = 0, *, publish: bool = True) -> None:
        """Compute the rest of the tokens in chunks, each asked for, launched and published."""
        while live.computed < len(live.tokens):
            size = min(chunk or len(live.tokens), len(live.tokens) - live.computed)
            assert self.extend(live, live.computed + size), "no room for a chunk"
            self.launch(live, size)
            if publish:
                self.publish(live)

    def decode(self, live: Live, tokens: Sequence[int], *, publish: bool = True) -> None:
        """Each token is sampled, given room and computed; the last one has KV too."""
        for token in tokens:
            live.append([token])
            assert self.extend(live, len(live.tokens)), "no room to decode"
            self.launch(live)
            if publish:
                self.publish(live)

    def sample(self, live: Live, tokens: Sequence[int]) -> None:
        """Tokens that were accepted but not computed yet."""
        live.append(tokens)

    def run(
        self, tokens: Sequence[int], output: Sequence[int] = (), namespace: Namespace = NS, **options: Any
    ) -> Grant:
        """A whole request: acquire, prefill, decode, finish."""
        live = self.start(tokens, namespace, **options)
        self.fetch_all(live)
        grant = live.grant
        self.prefill(live, options.get("chunk", 0))
        self.decode(live, output)
        self.release(live)
        return grant

    def orphaned(self, group: int) -> int:
        """Pages of fetches whose sequence has ended: theirs until the ack."""
        parts = [part for fetch in self.orphans.values() for part in fetch.groups if part.group == group]
        return sum(1 for part in parts for page in ids(part.page_ids) if page)

    def ack_orphan(self, ticket: int) -> None:
        fetch = self.orphans.pop(ticket)
        done = self.read_host(fetch)
        self.step(acks=[Ack(fetch.ticket, done, DONE if done == fetch.num_pages else MISSING)])

    # -- transfers ---------------------------------------------------------------------------------------------

    def do_spill(self, index: int = 0, num_done: int | None = None, status: TransferStatus | None = None) -> StepReply:
        """The mover carries out one spill order, or its first pages, and says so."""
        order, expected = self.spills.pop(index)
        num_done = order.num_pages if num_done is None else num_done
        status = status or (DONE if num_done == order.num_pages else FAILED)
        for part in order.groups:
            for page, key in list(zip(ids(part.page_ids), part.keys, strict=True))[:num_done]:
                if page:
                    value = self.shadow.value(part.group, page)
                    assert value == expected[key], "a page changed while its spill was under way"
                    self.store[key] = value
        return self.step(acks=[Ack(order.ticket, num_done, status, 64 * num_done, 0.001)])

    def spill_all(self) -> None:
        while self.spills:
            self.do_spill()

    def read_host(self, fetch: Transfer, num_done: int | None = None) -> int:
        """Bring leading pages from the host tier; stops at the first one that is not there."""
        limit = fetch.num_pages if num_done is None else num_done
        for i in range(limit):
            parts = [(p.group, ids(p.page_ids)[i], p.keys[i]) for p in fetch.groups if p.keys[i]]
            if any(key not in self.store for _, _, key in parts):
                return i
            for group, page, key in parts:
                self.shadow.store(group, page, self.store[key])
        return limit

    def do_fetch(self, live: Live, num_done: int | None = None, status: TransferStatus | None = None) -> StepReply:
        """One round of a sequence's fetch; its new grant is applied, a refusal ends the lease."""
        fetch = live.fetch
        assert fetch is not None
        done = self.read_host(fetch, num_done)
        status = status or (DONE if done == fetch.num_pages else MISSING)
        reply = self.step(acks=[Ack(fetch.ticket, done, status, 64 * done, 0.001)])
        self.fetched(live, reply)
        return reply

    def fetched(self, live: Live, reply: StepReply) -> None:
        if any(r.sequence_id == live.id for r in reply.refusals):
            live.fetch = None
            self.forget(live)
            return
        for grant in reply.grants:
            if grant.sequence_id == live.id:
                self.apply_grant(live, grant)

    def fetch_all(self, live: Live) -> None:
        rounds = 0
        while live.fetch is not None and not live.ended:
            self.do_fetch(live)
            rounds += 1
            assert rounds < 64, "replanning does not end"

    # -- deaths ------------------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        self.connected = False
        self.world.manager.disconnect(self.id, self.incarnation, self.world.now_ms)
        self.world.settle()

    def restart(self, incarnation: str) -> None:
        """The process died and came back: no pages, no sequences, a new identity."""
        self.live, self.spills, self.orphans, self.step_id = {}, [], {}, 0
        self.shadow = Shadow(self.page_tokens)
        self.incarnation = incarnation
        self.hello()

    def adopt(self, live: Live) -> Grant | Refusal:
        """Hand a sequence over to a manager that does not know it."""
        answer = self.world.manager.adopt(self.id, self.adopt_of(live), self.world.now_ms)
        if isinstance(answer, Refusal):
            self.forget(live)
            self.world.settle()
            return answer
        live.known_len, live.reported, live.leave, live.restored = len(live.tokens), live.computed, {}, True
        for pages in answer.tables:
            live.tables[pages.group] = {}
            self._set_pages(live, pages)
        live.room, live.adopted = live.computed, True
        live.working = {s.group: s.slot for s in answer.working}
        live.rolling = {s.group: s.slot for s in answer.rolling}
        live.grant = answer
        self._set_leave(live, answer.leave)
        self.world.settle()
        self.check_reads(live, "an adoption")
        return answer

    def adopt_of(self, live: Live) -> Adopt:
        tables = tuple(
            GroupPages(g, 0, array("I", self._owned(live, g)).tobytes())
            for g, spec in enumerate(self.groups)
            if spec.kind != GroupKind.STATE
        )
        slots = [
            tuple(SnapshotSlot(g, boundary, PageId(s)) for g, s in held.items())
            for held, boundary in ((live.working, 0), (live.rolling, live.rolled))
        ]
        return Adopt(
            SequenceId(live.id),
            live.namespace,
            pack(live.tokens),
            live.computed,
            tables,
            slots[0],
            slots[1],
            live.priority,
        )

    def _owned(self, live: Live, group: int) -> list[int]:
        """Page ids that the lease still holds: behind a running window they may be anybody's."""
        spec, row = self.groups[group], live.table(group)
        if spec.kind == GroupKind.WINDOW:
            first = max(0, live.reported - (spec.window_tokens - 1)) // self.page_tokens
            row = [0] * min(first, len(row)) + row[first:]
        return row
