"""The scheduler against the real cache manager, step by step, with audits and a memory that shows every wrong page."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cache_service.core import audit
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from session.limits import SessionLimits
from session.messages import Ack, Hello, Step, StepReply, Welcome
from session.words import GroupKind, GroupSpec, HostTierKind, Transfer, TransferStatus, WorkerId
from tests.examples import examples
from tests.worker_service.scheduler_machine import VOCAB, Machine, full_group, window_group
from tests.worker_service.test_scheduler_liveness import MAX_LEN, Workload
from worker_service.core.reply_handler import Fetch
from worker_service.core.scheduler import Launch, SchedulerConfig

WORKER = WorkerId("worker")


class RealManager:
    """A CacheManager with one worker."""

    def __init__(self, config: SchedulerConfig, epoch: str, *, host: bool, limits: SessionLimits | None = None) -> None:
        self.config = config
        self.epoch = epoch
        self.has_host = host
        settings = ManagerConfig(spill=SpillPolicy.WRITE_THROUGH, fetch=FetchPolicy.ALWAYS, transfer_pages=3)
        if limits is not None:
            names = set(limits._fields) & ManagerConfig.__dataclass_fields__.keys()
            settings = replace(settings, **{name: getattr(limits, name) for name in names})
        self.manager = CacheManager(settings, epoch)
        self.now_ms = 0
        self.last_step_id = 0
        self.num_refusals = 0

    def hello(self, generation: int) -> Welcome:
        kind = HostTierKind.SHARED if self.has_host else HostTierKind.NONE
        hello = Hello(
            WORKER,
            "127.0.0.1:1",
            "incarnation",
            b"f" * 32,
            self.config.page_tokens,
            self.config.groups,
            kind,
            "tier" if self.has_host else "",
            generation=generation,
        )
        return self.manager.hello(hello, self.now_ms)

    def step(self, step: Step) -> StepReply:
        self.now_ms += 7
        reply = self.manager.step(WORKER, step, self.now_ms)
        audit.check(self.manager)
        self.num_refusals += len(reply.refusals)
        return reply


class RealMachine(Machine):
    """A Machine whose manager, spills and snapshots are the real ones."""

    def __init__(self, config: SchedulerConfig, *, host: bool = False, rng: random.Random | None = None) -> None:
        self.store: dict[bytes, object] = {}
        self.spills: list[Transfer] = []
        self.has_host = host
        super().__init__(config, rng=rng)

    def new_manager(self, host: object) -> RealManager:  # type: ignore[override]
        self.real = self.make_manager("epoch", None)
        return self.real

    def make_manager(self, epoch: str, limits: SessionLimits | None) -> RealManager:
        return RealManager(self.config, epoch, host=self.has_host, limits=limits)

    # -- pages that travel --

    def apply(self, reply: StepReply) -> None:
        super().apply(reply)
        for key in self.real.manager.take_host_deletes():
            self.store.pop(key, None)
        self.spills += self.real.manager.take_orders(WORKER)

    def move_pages(self) -> bool:
        happened = super().move_pages()
        spills, self.spills = self.spills, []
        for transfer in spills:
            for key, group, page in self.parts(transfer):
                self.store[key] = self.content(group, page)
            self.scheduler.report(Ack(transfer.ticket, transfer.num_pages, TransferStatus.DONE))
        return happened or bool(spills)

    def parts(self, transfer: Transfer, page: int | None = None) -> list[tuple[bytes, int, int]]:
        """Key, group and page id of what moves: all of it, or one page of the run."""
        found = []
        for moved in transfer.groups:
            page_ids = memoryview(moved.page_ids).cast("I")
            numbers = range(transfer.num_pages) if page is None else (page,)
            found += [(moved.key(n, 0), moved.group, page_ids[n]) for n in numbers if page_ids[n]]
        return found

    def content(self, group: int, page: int) -> object:
        if self.config.groups[group].kind is GroupKind.STATE:
            return self.memory.get((group, page))
        return self.page_content(group, page)

    def fetch(self, fetch: Fetch) -> Ack:
        transfer = fetch.transfer
        for number in range(transfer.num_pages):
            parts = self.parts(transfer, number)
            if any(key not in self.store for key, _, _ in parts) or self.happens(0.1):
                return Ack(transfer.ticket, number, TransferStatus.MISSING)
            if self.happens(0.05):
                return Ack(transfer.ticket, number, TransferStatus.FAILED)
            for key, group, page in parts:
                if self.config.groups[group].kind is GroupKind.STATE:
                    self.memory[group, page] = self.store[key]  # type: ignore[assignment]
                else:
                    self.write_page(group, page, self.store[key])
        return Ack(transfer.ticket, transfer.num_pages, TransferStatus.DONE)

    def happens(self, probability: float) -> bool:
        return self.rng is not None and self.rng.random() < probability

    # -- recurrent state --

    def compute(self, launch: Launch) -> list[int]:
        tokens = super().compute(launch)
        for row in launch.rows:
            client = self.clients[row.sequence_id]
            end = row.first_token + row.num_tokens
            marks = self.marks(client.namespace, (client.prompt + client.tokens)[:end])
            for slot in row.working:
                restored = [snapshot.slot for snapshot in row.restore if snapshot.group == slot.group]
                if row.first_token:
                    source = (restored or [slot.slot])[0]
                    assert self.memory[slot.group, source] == marks[row.first_token - 1], "another prefix's state"
                self.memory[slot.group, slot.slot] = marks[-1]
            for snapshot in row.leave:
                self.memory[snapshot.group, snapshot.slot] = marks[snapshot.boundary_tokens - 1]
            if end % self.config.page_tokens == 0:
                for slot in row.rolling:
                    self.memory[slot.group, slot.slot] = marks[-1]
        return tokens

    # -- losses --

    def restart_manager(self, limits: SessionLimits | None = None) -> None:
        """With other settings for the next one, when `limits` say so."""
        assert self.launch is None
        self.fetches.clear()
        self.spills.clear()
        self.manager = self.real = self.make_manager(self.real.epoch + "+", limits)  # type: ignore[assignment]
        assert self.say_hello() is None

    def lose_session(self, *, reply_was_lost: bool) -> None:
        step = self.scheduler.next_step()
        if step is not None and reply_was_lost:
            self.real.step(step)
        self.end_launch()
        while self.fetches or self.spills:
            self.move_pages()  # the mover is drained before Hello
        self.real.manager.disconnect(WORKER, "incarnation", self.real.now_ms)
        assert self.say_hello() is step
        if step is not None:
            self.apply(self.real.step(step))

    def check_over(self) -> None:
        assert self.scheduler.num_unfinished == self.scheduler.num_waiting == self.scheduler.num_running == 0
        cache = self.real.manager.worker(WORKER)
        assert not len(cache.leases) and not len(cache.transfers)
        audit.check(self.real.manager)
        self.check_answers()


def config_of(rng: random.Random, groups: Callable[[int, int], tuple[GroupSpec, ...]]) -> SchedulerConfig:
    page_tokens = rng.choice([1, 2, 4])
    budget = rng.choice([4, 8, 16])
    return SchedulerConfig(
        page_tokens=page_tokens,
        groups=groups(page_tokens, budget),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        token_budget=budget,
        max_num_seqs=rng.randint(1, 4),
        max_acquires=rng.choice([1, 3, 8]),
        long_prefill_token_threshold=rng.choice([0, 4]),
        reserve_pages=rng.choice([0, 0, 2]),
    )


def full_only(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    return (full_group(MAX_LEN // page_tokens + 2)._replace(page_bytes=64),)


def with_window(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    window = 5
    num_pages = -(-(window + 2 * budget) // page_tokens) + 3
    return (*full_only(page_tokens, budget), window_group(num_pages, window)._replace(page_bytes=32))


def window_only(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    return with_window(page_tokens, budget)[1:]


def with_state(page_tokens: int, budget: int) -> tuple[GroupSpec, ...]:
    return (*full_only(page_tokens, budget), GroupSpec("state", GroupKind.STATE, 9, 16))


@pytest.mark.parametrize("groups", [full_only, with_window, window_only, with_state])
@pytest.mark.parametrize("with_faults", [False, True])
@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1 << 32), num_requests=st.integers(1, 12), host=st.booleans())
def test_every_answer_is_right(
    seed: int,
    num_requests: int,
    host: bool,
    groups: Callable[[int, int], tuple[GroupSpec, ...]],
    with_faults: bool,
) -> None:
    rng = random.Random(seed)
    machine = RealMachine(config_of(rng, groups), host=host, rng=rng if with_faults else None)
    Workload(machine, rng, num_requests, with_faults=with_faults).run()
    machine.check_over()
    usages = [client.usage for client in machine.clients.values() if client.usage is not None]
    event(f"refused: {machine.real.num_refusals > 0}")
    event(f"preempted: {any(usage.num_preemptions for usage in usages)}")
    event(f"cached: {any(usage.cached_tokens for usage in usages)}")
    event(f"fetched: {any(usage.fetched_tokens for usage in usages)}")
