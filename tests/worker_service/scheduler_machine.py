"""Drives a Scheduler against the real cache manager as the engine does, on a device that remembers who wrote what.

Every launch writes its slots and reads what attention would read, as late as the rules allow: a wrong page shows as
another prefix. Tokens are a function of the prefix, so any two runs of a request must agree.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from session.limits import SessionLimits
from session.messages import Forget, Step, StepReply
from session.words import GroupKind, GroupSpec, Namespace, SequenceId
from tests.core import audit
from tests.worker_service.audited_manager import LIMITS, WORKER, AuditedManager
from tests.worker_service.device_memory import DeviceMemory, marks_of
from tests.worker_service.host_mover import HostMover
from worker_service.core.batch_part import with_known_tokens
from worker_service.core.errors import LostPlace
from worker_service.core.launches import Launch, Output
from worker_service.core.reply_handler import Failed
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import Request, Usage

NAMESPACE = Namespace("model")
VOCAB = 50
STOPPED = "stopped by its text"
PAGE_BYTES = 64


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def next_token(mark: int) -> int:
    return mark % VOCAB


def next_of(prompt: list[int]) -> int:
    return next_token(marks_of(NAMESPACE, prompt)[-1])


def reference(namespace: Namespace, prompt: list[int], count: int) -> list[int]:
    """What a request generates, whatever else runs."""
    mark, tokens = marks_of(namespace, prompt)[-1], []
    for _ in range(count):
        tokens.append(next_token(mark))
        mark = hash((mark, tokens[-1]))
    return tokens


def full_group(num_pages: int) -> GroupSpec:
    return GroupSpec("full", GroupKind.FULL, num_pages, PAGE_BYTES)


def window_group(num_pages: int, window_tokens: int) -> GroupSpec:
    return GroupSpec("window", GroupKind.WINDOW, num_pages, PAGE_BYTES, window_tokens)


@dataclass
class Client:
    prompt: list[int]
    namespace: Namespace
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    failed: str = ""


class Machine:
    """One worker; `rng` is its mover's. `launch` is the oldest launch in flight, `queued` the one behind it."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        host: bool = False,
        rng: random.Random | None = None,
        limits: SessionLimits = LIMITS,
    ) -> None:
        self.config = config
        self.memory = DeviceMemory(config)
        self.manager = AuditedManager(config.groups, config.page_tokens, host=host, limits=limits)
        self.scheduler = Scheduler(config)
        self.say_hello()
        self.clients: dict[SequenceId, Client] = {}
        self.mover = HostMover(self.memory, rng)
        self.launch: Launch | None = None
        self.queued: Launch | None = None
        self.num_ended = self.num_queued = 0
        # A fetch waits for as many launches: those in flight when it was ordered may still write to its pages.
        self.barrier = 0
        self.last_tokens: list[int] = []
        self.launches: list[Launch] = []
        self.prefilled: dict[SequenceId, list[int]] = {}

    # -- clients --

    def ask(
        self,
        prompt: list[int],
        max_tokens: int = 1,
        namespace: Namespace = NAMESPACE,
        priority: int = 0,
        *,
        bypass_cache: bool = False,
        stop_token_ids: Iterable[int] = (),
        **params: float,
    ) -> SequenceId:
        sequence_id = SequenceId(len(self.clients) + 1)
        stops = frozenset(stop_token_ids)
        sampling = SamplingParams(max_tokens, ignore_eos=True, stop_token_ids=stops, **params)  # type: ignore[arg-type]
        request = Request(sequence_id, namespace, packed(prompt), sampling, priority, bypass_cache=bypass_cache)
        self.scheduler.add(request)
        self.clients[sequence_id] = Client(prompt, namespace, max_tokens, stops)
        return sequence_id

    def abort(self, sequence_id: SequenceId) -> None:
        if self.scheduler.abort(sequence_id):
            self.clients[sequence_id].failed = "aborted"

    def stop(self, sequence_id: SequenceId) -> None:
        """Its text has a stop string, perhaps while its next launch is in flight."""
        if self.scheduler.finish(sequence_id) is not None:
            self.clients[sequence_id].failed = STOPPED

    # -- one turn of the engine --

    def turn(self) -> bool:
        """Exchange a step, land, launch; False when nothing happened."""
        happened = self.exchange()
        happened |= self.end_launch()
        happened |= self.move_pages()
        return self.start() or happened

    def run(self, max_turns: int = 10_000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError(f"not idle after {max_turns} turns: {self.scheduler.num_unfinished} requests left")

    def exchange(self) -> bool:
        """A step and its reply; while there is no cache service, rows take pages by themselves."""
        if self.scheduler.is_detached:
            return self.scheduler.take_pages() > 0
        step = self.scheduler.next_step()
        if step is not None:
            self.apply(self.manager.step(step))
        return step is not None

    def apply(self, reply: StepReply) -> None:
        applied = self.scheduler.apply(reply)
        self.mover.fetches += [fetch.transfer for fetch in applied.fetches]
        self.barrier = len(self.launches) if applied.fetches else self.barrier
        self.give_up(applied.failed)
        for key in self.manager.manager.tiers.take_deletes():
            self.mover.store.pop(key, None)
        self.take_orders()

    def take_orders(self) -> None:
        for order in self.manager.manager.take_orders(WORKER):
            if isinstance(order, Forget):
                self.scheduler.forget(order)
            else:
                self.mover.spills.append(order)

    def follow_clears(self) -> bool:
        """Takes the orders that are due, and confirms."""
        self.take_orders()
        return self.exchange()

    def give_up(self, failed: Iterable[Failed]) -> None:
        for sequence_id, detail, field_name in failed:
            self.clients[sequence_id].failed = f"{field_name}: {detail}"

    def start(self) -> bool:
        """Launches, if nothing is in flight."""
        if self.launch is not None:
            return False
        self.launch = self._next_launch()
        return self.launch is not None

    def start_ahead(self) -> bool:
        """Queues a launch behind the one in flight."""
        if self.launch is None or self.queued is not None:
            return False
        self.queued = self._next_launch()
        self.num_queued += self.queued is not None
        return self.queued is not None

    def _next_launch(self) -> Launch | None:
        launch = self.scheduler.next_launch()
        if launch is not None:
            self.launches.append(launch)
            self.check_budget(launch)
        return launch

    def end_launch(self, failed_rows: Container[int] = ()) -> bool:
        """The launch has ended; the requests of `failed_rows` (indices of its rows) are to be forgotten."""
        launch, self.launch, self.queued = self.launch, self.queued, None
        if launch is None:
            return False
        self.num_ended += 1
        over = {row.sequence_id for row in launch.rows if self.clients[row.sequence_id].usage is not None}
        tokens = self.last_tokens = self.compute(launch)
        gone = {row.sequence_id for row in launch.rows if self.clients[row.sequence_id].failed}
        for index, row in enumerate(launch.rows):
            if index in failed_rows and row.sequence_id not in gone:
                self.clients[row.sequence_id].failed = "the launch failed"
        outputs = self.scheduler.complete(launch, [(token,) for token in tokens], failed_rows)
        for output in outputs:
            self.take(output)
        sampled = {row.sequence_id for row in launch.rows if row.samples and not self.clients[row.sequence_id].failed}
        sampled -= over
        assert sampled == {output.sequence_id for output in outputs}, "a sampled token was lost"
        return True

    def end_launches(self) -> None:
        while self.end_launch():
            pass

    def compute(self, launch: Launch) -> list[int]:
        """Returns the tokens of the rows that sample."""
        prefixes = []
        launch = launch._replace(batch=with_known_tokens(launch.batch, self.last_tokens))
        for index, row in enumerate(launch.rows):
            client, end = self.clients[row.sequence_id], row.first_token + row.num_tokens
            tokens = (client.prompt + client.tokens)[:end]
            if len(tokens) < end:  # it is over, and its last token was not taken
                tokens.append(launch.batch.token_ids[launch.batch.cu_seqlens_q[index]])
            prefixes.append((client.namespace, tokens))
        return [next_token(mark) for mark in self.memory.run(launch, prefixes)]

    def fail(self) -> None:
        """The launch fails as a whole."""
        assert self.launch is not None
        self.end_launch(range(len(self.launch.rows)))

    def take(self, output: Output) -> None:
        client = self.clients[output.sequence_id]
        client.tokens += output.token_ids
        if output.finish is not None:
            client.usage = output.usage

    def check_budget(self, launch: Launch) -> None:
        batch = launch.batch
        assert batch.num_tokens <= self.config.token_budget
        assert batch.num_seqs <= self.config.max_num_seqs
        assert len(batch.positions) == len(batch.token_ids) == batch.cu_seqlens_q[-1]
        for group, slots in zip(self.config.groups, batch.slot_mapping, strict=True):
            assert len(slots) == (0 if group.kind is GroupKind.STATE else batch.num_tokens)
        assert [row.num_tokens for row in launch.rows[: batch.num_decode_seqs]] == [1] * batch.num_decode_seqs
        for row in launch.rows[batch.num_decode_seqs :]:
            self.prefilled.setdefault(row.sequence_id, []).append(row.num_tokens)

    def move_pages(self) -> bool:
        """Carry out spills and pending fetches, once the launches have ended that were in flight when they came."""
        if self.num_ended < self.barrier:
            return False
        happened = not (self.mover.is_idle or self.mover.is_stalled)
        for ack in self.mover.move():
            self.scheduler.report(ack)
        return happened

    # -- losses --

    def say_hello(self) -> Step | None:
        """A new session; returns the step that is to be repeated."""
        readmission = self.scheduler.readmit(self.manager.hello(self.scheduler.generation))
        self.give_up(readmission.failed)
        for output in readmission.ended:
            self.take(output)
            self.clients[output.sequence_id].max_tokens = len(self.clients[output.sequence_id].tokens)
        return readmission.repeat

    def new_manager(self, limits: SessionLimits) -> None:
        """A manager that has just started, without state; the worker has not said Hello to it yet."""
        old = self.manager
        self.manager = AuditedManager(old.groups, old.page_tokens, old.epoch + "+", host=old.has_host, limits=limits)

    def restart_manager(self, limits: SessionLimits | None = None) -> None:
        """It comes back knowing nothing, with other limits when `limits` says so; the mover was drained."""
        self.end_launches()
        self.mover.forget()
        self.new_manager(limits or self.manager.limits)
        assert self.say_hello() is None

    def adopt_all(self) -> None:
        """Exchange the steps that carry adopts."""
        while self.scheduler.num_adopting:
            assert self.exchange()

    def drain(self) -> None:
        """As before a Welcome is followed: the launches end, then what moves."""
        self.end_launches()
        while not self.mover.is_idle:
            self.move_pages()

    def lose_session(self, *, reply_was_lost: bool) -> None:
        """The stream broke with a step on its way: either it or its reply never arrived."""
        step = self.scheduler.next_step()
        if step is not None and reply_was_lost:
            self.manager.step(step)
        self.drain()
        self.manager.disconnect()
        assert self.say_hello() is step
        if step is not None:
            self.apply(self.manager.step(step))

    def lose_service(self, *, step_arrived: bool = True) -> None:
        """The cache service says nothing any more, with a step on its way: the worker gives up its state."""
        step = self.scheduler.next_step()
        if step is not None and step_arrived:
            self.manager.step(step)
        if not self.mover.is_idle:
            self.drain()
        self.manager.disconnect()
        self.scheduler.detach()

    def find_service(self, *, restarted: bool = False, late_hello: bool = False) -> None:
        """It is back, with the state that it had or without. `late_hello` was sent before that state was given up."""
        self.end_launches()
        if restarted:
            self.new_manager(self.manager.limits)
        elif late_hello:
            welcome = self.manager.hello(self.manager.generation)
            try:
                self.scheduler.readmit(welcome)
            except LostPlace:
                self.manager.disconnect()
            else:
                raise AssertionError("a state was followed that had been given up")
        assert self.say_hello() is None
        assert not self.scheduler.is_detached

    # -- the end --

    def check_over(self) -> None:
        assert self.scheduler.num_unfinished == self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert not self.manager.leases and not len(self.manager.cache.transfers)
        audit.check(self.manager.manager)
        self.check_answers()

    def check_answers(self) -> None:
        for client in self.clients.values():
            expected = self.expected(client)
            if client.failed:
                assert client.tokens == expected[: len(client.tokens)]
            else:
                assert client.tokens == expected
                self.check_usage(client)

    def expected(self, client: Client) -> list[int]:
        tokens = reference(client.namespace, client.prompt, client.max_tokens)
        stop = next((at for at, token in enumerate(tokens) if token in client.stop_token_ids), len(tokens))
        return tokens[: stop + 1]

    def check_usage(self, client: Client) -> None:
        usage = client.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.generated_tokens) == (len(client.prompt), len(client.tokens))
        reused = usage.cached_tokens + usage.fetched_tokens
        if usage.num_preemptions == 0:
            assert reused + usage.computed_tokens == usage.prompt_tokens
        else:
            assert usage.computed_tokens >= 1
