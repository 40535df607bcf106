"""Drives a Scheduler against the real cache manager, with its spills, fetches and snapshots."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import replace

from cache_service.core import audit
from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from cache_service.core.device.device_cache import DeviceCache
from cache_service.core.device.lease_table import LeaseTable
from session.limits import SessionLimits
from session.messages import Ack, Hello, Step, StepReply, Welcome
from session.words import GroupKind, HostTierKind, Namespace, SequenceId, Transfer, TransferStatus, WorkerId
from tests.worker_service.scheduler_machine import Machine
from worker_service.core.reply_handler import Fetch
from worker_service.core.scheduler import Launch, SchedulerConfig

WORKER = WorkerId("worker")


class RealManager:
    """A CacheManager with one worker, audited after each step; notes what tests ask of it."""

    def __init__(self, config: SchedulerConfig, epoch: str, *, host: bool, limits: SessionLimits | None = None) -> None:
        self.config = config
        self.epoch = epoch
        self.has_host = host
        settings = ManagerConfig(spill=SpillPolicy.WRITE_THROUGH, fetch=FetchPolicy.ALWAYS, transfer_pages=3)
        if limits is not None:
            names = set(limits._fields) & ManagerConfig.__dataclass_fields__.keys()
            settings = replace(settings, **{name: getattr(limits, name) for name in names})
        self.manager = CacheManager(settings, epoch)
        # Two of them are no settings of a manager; the steps are held to them here.
        self.limits = self.manager.limits if limits is None else limits
        self.now_ms = 0
        self.num_refusals = 0
        self.num_acquires: Counter[SequenceId] = Counter()
        self.order: list[SequenceId] = []  # who was granted, in the order of first grants
        self.adopted: list[SequenceId] = []
        self.sent_bytes = 0  # of prompts

    def hello(self, generation: int) -> Welcome:
        hello = Hello(
            WORKER,
            "127.0.0.1:1",
            "incarnation",
            b"f" * 32,
            self.config.page_tokens,
            self.config.groups,
            HostTierKind.SHARED if self.has_host else HostTierKind.NONE,
            "tier" if self.has_host else "",
            generation=generation,
        )
        return self.manager.hello(hello, self.now_ms)._replace(limits=self.limits)

    @property
    def cache(self) -> DeviceCache:
        return self.manager.worker(WORKER)

    @property
    def leases(self) -> LeaseTable:
        return self.cache.leases

    def cached_tokens(self, namespace: Namespace, tokens: list[int]) -> int:
        """Returns how many leading tokens of this prompt are findable."""
        (found,) = self.manager.match(namespace, array("i", tokens).tobytes(), WORKER)
        return found.match.matched_tokens

    def step(self, step: Step) -> StepReply:
        self.now_ms += 7
        assert all(len(items) <= self.limits.max_step_items for items in step if isinstance(items, tuple))
        is_repeated = step.step_id == self.last_step_id
        reply = self.manager.step(WORKER, step, self.now_ms)
        audit.check(self.manager)
        if not is_repeated:
            self._note(step, reply)
        self.reply = reply
        return reply

    @property
    def generation(self) -> int:
        return self.manager.workers[WORKER].generation

    @property
    def last_step_id(self) -> int:
        return self.manager.workers[WORKER].last_step_id

    @last_step_id.setter
    def last_step_id(self, step_id: int) -> None:
        self.manager.workers[WORKER].last_step_id = step_id

    def forget(self) -> None:
        """The worker is away for longer than the grace period."""
        self.manager.disconnect(WORKER, "incarnation", self.now_ms)
        self.now_ms += self.manager.config.grace_ms + 1
        self.manager.tick(self.now_ms)
        assert WORKER not in self.manager.workers

    def _note(self, step: Step, reply: StepReply) -> None:
        self.num_refusals += len(reply.refusals)
        self.sent_bytes += sum(len(acquire.tokens) for acquire in step.acquires)
        self.num_acquires.update(acquire.sequence_id for acquire in step.acquires)
        adopts = {adopt.sequence_id for adopt in step.adopts}
        for grant in reply.grants:
            if grant.sequence_id in adopts:
                self.adopted.append(grant.sequence_id)
            elif grant.sequence_id not in self.order:
                self.order.append(grant.sequence_id)


class RealMachine(Machine):
    """A Machine whose manager, spills and snapshots are the real ones."""

    def __init__(self, config: SchedulerConfig, *, host: bool = False, rng: random.Random | None = None) -> None:
        self.store: dict[bytes, object] = {}
        self.spills: list[Transfer] = []
        self.has_host = host
        self.is_mover_stalled = False
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
        if self.is_mover_stalled:
            return False
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
        self.manager = self.real = self.make_manager(self.real.epoch + "+", limits or self.real.limits)  # type: ignore[assignment]
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
