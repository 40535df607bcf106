"""The real cache manager with one worker, audited after each step: what the worker's tests talk to."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace

from cache_service.core.base.types import FetchPolicy, SpillPolicy
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from cache_service.core.device.lease_table import LeaseTable
from cache_service.core.device_cache import DeviceCache
from session.limits import SessionLimits
from session.messages import Hello, RunRefusal, Step, StepReply, Welcome
from session.protocol import WORKER_CAPABILITIES
from session.words import GroupSpec, HostTierKind, Namespace, SequenceId, WorkerId
from tests.core import audit

WORKER = WorkerId("worker")
LIMITS = SessionLimits(max_kept_bytes=1 << 20, grace_ms=1000)


class AuditedManager:
    """Notes what tests ask of it: who was granted, refused and adopted, and what was sent."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        page_tokens: int,
        epoch: str = "epoch-1",
        *,
        host: bool = False,
        limits: SessionLimits = LIMITS,
    ) -> None:
        self.groups, self.page_tokens, self.epoch = groups, page_tokens, epoch
        self.has_host = host
        settings = ManagerConfig(spill=SpillPolicy.WRITE_THROUGH, fetch=FetchPolicy.ALWAYS, transfer_pages=3)
        names = set(limits._fields) & ManagerConfig.__dataclass_fields__.keys()
        self.manager = CacheManager(replace(settings, **{name: getattr(limits, name) for name in names}), epoch)
        # Two of them are no settings of a manager; the steps are held to them here.
        self.limits = limits
        self.now_ms = 0
        self.num_refusals = 0
        self.run_refusals: list[RunRefusal] = []
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
            self.page_tokens,
            self.groups,
            HostTierKind.SHARED if self.has_host else HostTierKind.NONE,
            "tier" if self.has_host else "",
            generation=generation,
            capabilities=WORKER_CAPABILITIES,
        )
        return self.manager.hello(hello, self.now_ms)._replace(limits=self.limits)

    def step(self, step: Step) -> StepReply:
        self.now_ms += 7
        runs = step.inventory.runs if step.inventory is not None else ()
        items = [*(items for items in step if isinstance(items, tuple) and items is not step.inventory), runs]
        assert all(len(some) <= self.limits.max_step_items for some in items)
        is_repeated = step.step_id == self.last_step_id
        self.reply = self.manager.step(WORKER, step, self.now_ms)
        audit.check(self.manager)
        if not is_repeated:
            self._note(step, self.reply)
        return self.reply

    def _note(self, step: Step, reply: StepReply) -> None:
        self.num_refusals += len(reply.refusals)
        self.run_refusals += reply.run_refusals
        self.sent_bytes += sum(len(acquire.tokens) for acquire in step.acquires)
        self.num_acquires.update(acquire.sequence_id for acquire in step.acquires)
        adopts = {adopt.sequence_id for adopt in step.adopts}
        for grant in reply.grants:
            if grant.sequence_id in adopts:
                self.adopted.append(grant.sequence_id)
            elif grant.sequence_id not in self.order:
                self.order.append(grant.sequence_id)

    # What it holds.

    @property
    def cache(self) -> DeviceCache:
        return self.manager.worker(WORKER)

    @property
    def leases(self) -> LeaseTable:
        return self.cache.leases

    @property
    def is_idle(self) -> bool:
        """Whether no sequence holds a lease; true of a worker that is yet to say Hello."""
        return WORKER not in self.manager.workers or not self.leases

    @property
    def generation(self) -> int:
        return self.manager.workers[WORKER].generation

    @property
    def last_step_id(self) -> int:
        return self.manager.workers[WORKER].last_step_id

    @last_step_id.setter
    def last_step_id(self, step_id: int) -> None:
        self.manager.workers[WORKER].last_step_id = step_id

    def cached_tokens(self, namespace: Namespace, tokens: list[int]) -> int:
        """Returns how many leading tokens of this prompt are findable."""
        (found,) = self.manager.match(namespace, array("i", tokens).tobytes(), WORKER)
        return found.match.matched_tokens

    # Losses and refusals.

    def disconnect(self) -> None:
        self.manager.disconnect(WORKER, "incarnation", self.now_ms)

    def forget(self) -> None:
        """The worker is away for longer than the grace period."""
        self.disconnect()
        self.now_ms += self.manager.config.grace_ms + 1
        self.manager.tick(self.now_ms)
        assert WORKER not in self.manager.workers

    def refuse_acquires_and_replans(self) -> None:
        """From now on, for want of pages, while another sequence holds a lease; extends are granted."""
        self.cache.config = replace(self.cache.config, max_lease_bytes=1)
