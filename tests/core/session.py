"""A fake worker's stream to a real manager: Hello, Steps whose replies it applies, and broken streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from session.errors import FieldError
from session.messages import Acquire, Hello, Rates, Step, StepReply, Welcome
from session.words import GroupSpec, HostTierKind, RefusalReason, Transfer, WorkerId
from tests.core.shadow import Value
from tests.core.tables import TableKeeper
from tests.core.world import FINGERPRINT, Live, World, ids, keys


class Session(TableKeeper):
    """One worker's name, incarnation and step ids."""

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
        self.spills: list[tuple[Transfer, dict[bytes, Value]]] = []
        self.orphans: dict[int, Transfer] = {}
        self.step_id = 0
        self.connected = False
        self.rates: Rates | None = None
        self.last_step: Step | None = None
        self.model = ""  # of any
        self.generation, self.epoch = 0, ""
        self.applied = 0  # the last step id that the state of this generation knows
        self.goes_on = False  # whether the last Welcome was to the state that this worker knew
        self.kept: dict[int, int] = {}  # leading tokens that the manager may have kept, by sequence
        self.loses_reply: Callable[[], bool] = lambda: False
        world.workers[worker_id] = self
        self.hello()

    def hello(self) -> Welcome:
        hello = Hello(
            self.id,
            "127.0.0.1:1",
            self.incarnation,
            FINGERPRINT,
            self.page_tokens,
            self.groups,
            self.host_tier,
            self.host_tier_id,
            self.num_ranks,
            self.model,
            self.generation,
        )
        welcome = self.world.manager.hello(hello, self.world.now_ms)
        self.goes_on = (welcome.epoch, welcome.generation) == (self.epoch, self.generation)
        if not self.goes_on:
            self.kept.clear()
            self.applied = 0
        self.generation, self.epoch = welcome.generation, welcome.epoch
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
            assert len(part.page_hashes) == 32 * order.num_pages == 8 * len(part.page_ids)
            for page, key in zip(ids(part.page_ids), keys(part), strict=True):
                if page:
                    value = self.shadow.value(part.group, page)
                    assert "poison" not in value, "a spill order for a page that was never written"
                    assert self.world.value_of_key.setdefault(key, value) == value, "one key, two contents"
                    values[key] = value
        return values

    def step(self, **fields: Any) -> StepReply:
        """One Step of good items."""
        reply = self.raw_step(**fields)
        bad = [refusal for refusal in reply.refusals if refusal.reason is RefusalReason.INVALID]
        assert not bad, bad
        return reply

    def raw_step(self, **fields: Any) -> StepReply:
        """One Step, maybe with bad items; on a FieldError nothing may have changed and the id is used again."""
        step = self.next_step(**fields)
        before = self.world.snapshot()
        try:
            reply = self.world.manager.step(self.id, step, self.world.now_ms)
        except FieldError:
            assert self.world.snapshot() == before, "a failed step changed something"
            raise
        if self.loses_reply():
            self._ask_again(step, reply)
            before = None  # a new stream voids orders
        self.step_id += 1
        self.applied = self.step_id
        self.last_step = step
        assert reply.step_id == self.step_id
        for remap in reply.remaps:
            self._apply_remap(remap)
        wanted = {extend.sequence_id: extend.num_tokens for extend in step.extends}
        for extended in reply.extends:
            self._apply_extend(extended, wanted[extended.sequence_id])
        self._after(before, step, reply)
        return reply

    def next_step(self, **fields: Any) -> Step:
        return Step(self.step_id + 1, **{name: tuple(value) for name, value in fields.items()}, rates=self.rates)

    def _ask_again(self, step: Step, reply: StepReply) -> None:
        """The stream broke before the reply came: the same step, on a new stream, has the same answer."""
        self.disconnect()
        self.spills.clear()
        assert self.hello().last_step_id == step.step_id
        assert self.world.manager.step(self.id, step, self.world.now_ms) == reply

    def _after(self, before: object, step: Step, reply: StepReply) -> None:
        for refusal in reply.refusals:
            if refusal.reason is RefusalReason.NO_ROOM:
                self._remember_kept(step, refusal.sequence_id)
            elif refusal.reason is RefusalReason.RESEND:
                self.kept.pop(refusal.sequence_id, None)
        only_asks = not (step.acks or step.publishes or step.releases or step.rates)
        if before is not None and only_asks and not reply.grants and not reply.extends and reply.refusals:
            assert self.world.snapshot() == before, "a refusal changed something"
        self.world.settle()

    def _remember_kept(self, step: Step, sequence_id: int) -> None:
        for acquire in step.acquires:
            if isinstance(acquire, Acquire) and acquire.sequence_id == sequence_id:
                self.kept[sequence_id] = acquire.kept_tokens + len(acquire.tokens) // 4

    def disconnect(self) -> None:
        self.connected = False
        self.world.manager.disconnect(self.id, self.incarnation, self.world.now_ms)
        self.world.settle()

    def forget(self, live: Live) -> None:
        live.ended = True
        self.orphans.update((fetch.ticket, fetch) for fetch in live.fetches)
        self.live.pop(live.id, None)
