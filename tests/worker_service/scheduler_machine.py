"""Drives a Scheduler against a FakeManager as the engine does, with a memory that knows what each slot holds.

Every launch writes its slots and reads what attention would read, as late as the rules allow: a wrong page shows as
another prefix. Tokens are a function of the prefix, so any two runs of a request must agree.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from session.limits import SessionLimits
from session.messages import Ack, Step, StepReply
from session.words import GroupKind, GroupSpec, Namespace, SequenceId, TransferStatus
from tests.worker_service.fake_manager import FakeManager
from worker_service.core.batch import Batch
from worker_service.core.reply_handler import Failed, Fetch
from worker_service.core.scheduler import Launch, Output, Scheduler, SchedulerConfig
from worker_service.core.sequence import Request, SamplingParams, Usage

NAMESPACE = Namespace("model")
VOCAB = 50
STOPPED = "stopped by its text"


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def prefix_mark(namespace: Namespace, tokens: list[int]) -> int:
    mark = hash(namespace)
    for token in tokens:
        mark = hash((mark, token))
    return mark


def next_token(mark: int) -> int:
    return mark % VOCAB


def reference(namespace: Namespace, prompt: list[int], count: int) -> list[int]:
    """What a request generates, whatever else runs."""
    mark, tokens = prefix_mark(namespace, prompt), []
    for _ in range(count):
        tokens.append(next_token(mark))
        mark = hash((mark, tokens[-1]))
    return tokens


def full_group(num_pages: int) -> GroupSpec:
    return GroupSpec("full", GroupKind.FULL, num_pages, 0)


def window_group(num_pages: int, window_tokens: int) -> GroupSpec:
    return GroupSpec("window", GroupKind.WINDOW, num_pages, 0, window_tokens)


@dataclass
class Client:
    prompt: list[int]
    namespace: Namespace
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    failed: str = ""


class Machine:
    """One worker. `rng` decides how many of several equal things happen; without one everything happens at once."""

    def __init__(self, config: SchedulerConfig, *, host: bool = False, rng: random.Random | None = None) -> None:
        self.config = config
        self.rng = rng
        self.memory: dict[tuple[int, int], int] = {}
        self.manager = self.new_manager({} if host else None)
        self.scheduler = Scheduler(config)
        self.say_hello()
        self.clients: dict[SequenceId, Client] = {}
        self.fetches: list[Fetch] = []
        self.launch: Launch | None = None
        self.launches: list[Launch] = []
        self.prefilled: dict[SequenceId, list[int]] = {}

    def new_manager(self, host: dict[tuple[Namespace, bytes], list[object]] | None) -> FakeManager:
        return FakeManager(self.config.groups, self.config.page_tokens, host, self.page_content)

    # -- clients --

    def ask(
        self,
        prompt: list[int],
        max_tokens: int = 1,
        namespace: Namespace = NAMESPACE,
        priority: int = 0,
        *,
        bypass_cache: bool = False,
    ) -> SequenceId:
        sequence_id = SequenceId(len(self.clients) + 1)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(sequence_id, namespace, packed(prompt), sampling, priority, bypass_cache=bypass_cache)
        self.scheduler.add(request)
        self.clients[sequence_id] = Client(prompt, namespace, max_tokens)
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
        step = self.scheduler.next_step()
        if step is not None:
            self.apply(self.manager.step(step))
        return step is not None

    def apply(self, reply: StepReply) -> None:
        effects = self.scheduler.apply(reply)
        self.fetches += effects.fetches
        self.give_up(effects.failed)

    def give_up(self, failed: Iterable[Failed]) -> None:
        for sequence_id, detail, field_name in failed:
            self.clients[sequence_id].failed = f"{field_name}: {detail}"

    def start(self) -> bool:
        self.launch = self.scheduler.next_launch()
        if self.launch is not None:
            self.launches.append(self.launch)
            self.check_budget(self.launch)
        return self.launch is not None

    def end_launch(self, failed_rows: Container[int] = ()) -> bool:
        """The launch has ended; the requests of `failed_rows` (indices of its rows) are to be forgotten."""
        launch, self.launch = self.launch, None
        if launch is None:
            return False
        tokens = self.compute(launch)
        gone = {row.sequence_id for row in launch.rows if self.clients[row.sequence_id].failed}
        for index, row in enumerate(launch.rows):
            if index in failed_rows and row.sequence_id not in gone:
                self.clients[row.sequence_id].failed = "the launch failed"
        outputs = self.scheduler.complete(launch, [(token,) for token in tokens], failed_rows)
        for output in outputs:
            self.take(output)
        sampled = {row.sequence_id for row in launch.rows if row.samples and not self.clients[row.sequence_id].failed}
        assert sampled == {output.sequence_id for output in outputs}, "a sampled token was lost"
        return True

    def fail(self) -> None:
        """The launch fails as a whole."""
        assert self.launch is not None
        self.end_launch(range(len(self.launch.rows)))

    def take(self, output: Output) -> None:
        client = self.clients[output.sequence_id]
        client.tokens += output.token_ids
        if output.finish is not None:
            client.usage = output.usage

    # -- the device --

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

    def compute(self, launch: Launch) -> list[int]:
        """Write each slot, then read each key; the tokens of the rows that sample."""
        batch, marks = launch.batch, []
        for index, row in enumerate(launch.rows):
            client = self.clients[row.sequence_id]
            all_tokens = client.prompt + client.tokens
            end = row.first_token + row.num_tokens
            first = batch.cu_seqlens_q[index]
            assert batch.token_ids[first : first + row.num_tokens].tolist() == all_tokens[row.first_token : end]
            assert batch.positions[first : first + row.num_tokens].tolist() == list(range(row.first_token, end))
            marks.append(self.marks(client.namespace, all_tokens[:end]))
            for group in self.config.paged_groups:
                slots = batch.slot_mapping[group]
                for offset, position in enumerate(range(row.first_token, end)):
                    self.memory[group, slots[first + offset]] = marks[index][position]
        for index, row in enumerate(launch.rows):
            self.check_reads(batch, index, row.first_token, marks[index])
        return [next_token(marks[sampled.row][-1]) for sampled in batch.sampled]

    def marks(self, namespace: Namespace, tokens: list[int]) -> list[int]:
        mark, marks = hash(namespace), []
        for token in tokens:
            mark = hash((mark, token))
            marks.append(mark)
        return marks

    def check_reads(self, batch: Batch, index: int, first_token: int, marks: list[int]) -> None:
        page_tokens = self.config.page_tokens
        for group in self.config.paged_groups:
            spec = self.config.groups[group]
            width = batch.table_widths[group]
            table = batch.block_tables[group][index * width : (index + 1) * width]
            window = spec.window_tokens if spec.kind is GroupKind.WINDOW else len(marks)
            for position in range(max(first_token - window + 1, 0), len(marks)):
                page = table[position // page_tokens]
                assert page, "attention reads a hole"
                slot = page * page_tokens + position % page_tokens
                assert self.memory.get((group, slot)) == marks[position], "attention reads another prefix"

    def page_content(self, group: int, page: int) -> object:
        start = page * self.config.page_tokens
        return [self.memory.get((group, start + offset)) for offset in range(self.config.page_tokens)]

    # -- the mover --

    def move_pages(self) -> bool:
        """Carry out pending fetches (each now or later); never while a launch runs."""
        assert self.launch is None
        now = [fetch for fetch in self.fetches if self.rng is None or self.rng.random() < 0.5]
        pending = len(self.fetches)
        self.fetches = [fetch for fetch in self.fetches if fetch not in now]
        for fetch in now:
            self.scheduler.report(self.fetch(fetch))
        return pending > 0

    def fetch(self, fetch: Fetch) -> Ack:
        ticket = self.manager.tickets[fetch.transfer.ticket]
        assert self.manager.host is not None
        for number, key in enumerate(ticket.keys):
            content = self.manager.host.get(key)
            if content is None or (self.rng is not None and self.rng.random() < 0.1):
                return Ack(fetch.transfer.ticket, number, TransferStatus.MISSING)
            for group, pages in enumerate(ticket.pages):
                self.write_page(group, pages[number], content[group])
        if self.rng is not None and self.rng.random() < 0.1:
            return Ack(fetch.transfer.ticket, 0, TransferStatus.FAILED)
        return Ack(fetch.transfer.ticket, len(ticket.keys), TransferStatus.DONE)

    def write_page(self, group: int, page: int, content: object) -> None:
        assert isinstance(content, list)
        for offset, mark in enumerate(content):
            self.memory[group, page * self.config.page_tokens + offset] = mark

    # -- losses --

    def say_hello(self) -> Step | None:
        """A new session; returns the step that is to be repeated."""
        readmission = self.scheduler.readmit(self.manager.hello(self.scheduler.generation))
        self.give_up(readmission.failed)
        return readmission.repeat

    def restart_manager(self, limits: SessionLimits | None = None) -> None:
        """It comes back knowing nothing; the mover was drained and the launch has ended."""
        assert self.launch is None
        self.fetches.clear()
        former = self.manager
        self.manager = self.new_manager(former.host)
        self.manager.epoch = former.epoch + "+"
        self.manager.order = former.order
        self.manager.limits = limits or former.limits
        assert self.say_hello() is None

    def adopt_all(self) -> None:
        """Exchange the steps that carry adopts."""
        while self.scheduler.num_adopting:
            assert self.exchange()

    def lose_session(self, *, reply_was_lost: bool) -> None:
        """The stream broke with a step on its way: either it or its reply never arrived."""
        step = self.scheduler.next_step()
        if step is not None and reply_was_lost:
            self.manager.step(step)
        self.end_launch()
        assert self.say_hello() is step
        if step is not None:
            self.apply(self.manager.step(step))

    # -- the end --

    def check_over(self) -> None:
        assert self.scheduler.num_unfinished == self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert not self.manager.leases and not self.manager.tickets
        assert not any(any(readers.values()) for readers in self.manager.readers)
        self.check_answers()

    def check_answers(self) -> None:
        for client in self.clients.values():
            expected = reference(client.namespace, client.prompt, client.max_tokens)
            if client.failed:
                assert client.tokens == expected[: len(client.tokens)]
            else:
                assert client.tokens == expected
                self.check_usage(client)

    def check_usage(self, client: Client) -> None:
        usage = client.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.generated_tokens) == (len(client.prompt), client.max_tokens)
        reused = usage.cached_tokens + usage.fetched_tokens
        if usage.num_preemptions == 0:
            assert reused + usage.computed_tokens == usage.prompt_tokens
        else:
            assert usage.computed_tokens >= 1
