"""Launches in flight: their order, what a barrier waits for, and a launch that fails with another one behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from session.words import Namespace, SequenceId
from tests.worker_service.audited_manager import AuditedManager
from tests.worker_service.scheduler_machine import full_group, packed
from worker_service.core.batch import Batch
from worker_service.core.batch_part import with_known_tokens
from worker_service.core.errors import DeviceLost
from worker_service.core.launches import Launch
from worker_service.core.runner_port import Completed, LaunchTokens
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import Request
from worker_service.launch.launcher import EndedLaunch, Launcher
from worker_service.launch.row_faults import RowResults

PAGE = 4


@dataclass
class Device:
    """A row's token is the token before it plus one. `gate` holds results back; `fail` makes a submit raise."""

    gate: threading.Event = field(default_factory=threading.Event)
    fail: Callable[[Batch], bool] = lambda batch: False
    fail_wait: Callable[[Batch], bool] = lambda batch: False
    previous: Sequence[int] = ()
    submitted: list[Batch] = field(default_factory=list)

    def submit(self, batch: Batch) -> Handle:
        self.submitted.append(batch)
        if self.fail(batch):
            raise RuntimeError("no")
        known = with_known_tokens(batch, self.previous)
        tokens = tuple(known.token_ids[known.logits_rows[at]] + 1 for at in range(len(known.sampled)))
        self.previous = tokens
        return Handle(self, LaunchTokens(tokens, (None,) * len(tokens)), self.fail_wait(batch))

    def set_previous(self, token_ids: Sequence[int]) -> None:
        self.previous = token_ids


class Handle(NamedTuple):
    device: Device
    tokens: LaunchTokens
    fails: bool

    def wait(self) -> Completed:
        assert self.device.gate.wait(10)
        if self.fails:
            raise RuntimeError("later")
        return Completed(self.tokens)


@dataclass
class TwoBuffers(Device):
    """Its results lie in one of two buffers until they are read, as in model/staging.py."""

    buffers: list[LaunchTokens] = field(default_factory=lambda: [LaunchTokens((), ())] * 2)
    num_started: int = 0

    def submit(self, batch: Batch) -> BufferHandle:  # type: ignore[override]
        at = self.num_started % 2
        self.buffers[at] = super().submit(batch).tokens
        self.num_started += 1
        return BufferHandle(self, at, self.gate if self.num_started == 1 else None)


class BufferHandle(NamedTuple):
    device: TwoBuffers
    buffer: int
    gate: threading.Event | None

    def wait(self) -> Completed:
        """The device is done; the thread that reads the results may come late, at the gate."""
        assert self.gate is None or self.gate.wait(10)
        return Completed(self.device.buffers[self.buffer])


class Stand:
    """A scheduler with three sequences that are granted, and a launcher."""

    def __init__(self, timeout_s: float = 0.0, device: Device | None = None, max_tokens: int = 6) -> None:
        config = SchedulerConfig(PAGE, (full_group(64),), max_model_len=64, vocab_size=100)
        self.scheduler = Scheduler(config)
        self.manager = AuditedManager(config.groups, PAGE, host=False)
        self.scheduler.readmit(self.manager.hello(self.scheduler.generation))
        self.ask((1, 2, 3), max_tokens)
        self.device = device or Device()
        self.launcher = Launcher(self.device, timeout_s)
        self.ended = threading.Semaphore(0)

    def ask(self, numbers: Sequence[int], max_tokens: int) -> None:
        for number in numbers:
            prompt, sampling = packed([10 * number, 10 * number + 1]), SamplingParams(max_tokens=max_tokens)
            self.scheduler.add(Request(SequenceId(number), Namespace("model"), prompt, sampling))
        step = self.scheduler.next_step()
        assert step is not None
        self.scheduler.apply(self.manager.step(step))

    def start(self) -> Launch:
        launch = self.scheduler.next_launch()
        assert launch is not None
        self.launcher.start(launch, self.ended.release)
        return launch

    def take(self) -> EndedLaunch:
        assert self.ended.acquire(timeout=10)
        ended = self.launcher.take_ended()
        assert ended is not None
        return ended

    def complete(self, ended: EndedLaunch) -> dict[int, tuple[int, ...]]:
        results = results_of(ended)
        accepted = [(token,) for token in results.token_ids]
        outputs = self.scheduler.complete(ended.launch, accepted, results.errors)
        return {output.sequence_id: output.token_ids for output in outputs}


def results_of(ended: EndedLaunch) -> RowResults:
    assert isinstance(ended.outcome, RowResults)
    return ended.outcome


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_the_second_launch_goes_on_from_tokens_that_the_host_has_not_seen(stand: Stand) -> None:
    stand.start()
    second = stand.start()
    assert second.batch.from_previous.tolist() == [0, 1, 2]
    assert stand.launcher.num_in_flight == 2
    assert stand.launcher.take_ended() is None
    stand.device.gate.set()
    assert stand.complete(stand.take()) == {1: (12,), 2: (22,), 3: (32,)}
    assert stand.complete(stand.take()) == {1: (13,), 2: (23,), 3: (33,)}
    stand.launcher.close()


def test_a_barrier_waits_for_all_launches_in_flight_and_for_none_after_it(stand: Stand) -> None:
    stand.start()
    stand.start()
    barrier = stand.launcher.barrier()
    waited = threading.Event()

    def wait() -> None:
        barrier()
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not waited.wait(0.05)
    stand.device.gate.set()
    assert waited.wait(10)
    stand.complete(stand.take())
    stand.device.gate.clear()
    stand.start()
    barrier()
    stand.device.gate.set()
    stand.launcher.close()


def test_rows_of_a_launch_that_failed_in_part_are_gone_on_with_behind_it(stand: Stand) -> None:
    """The middle row fails whenever it runs; the launch behind was planned with all three."""
    stand.device.gate.set()
    stand.device.fail = lambda batch: any(20 <= token < 30 for token in batch.token_ids)
    stand.start()
    stand.start()
    first = stand.take()
    assert set(results_of(first).errors) == {1}
    assert stand.complete(first) == {1: (12,), 3: (32,)}
    second = stand.take()
    assert stand.complete(second) == {1: (13,), 3: (33,)}
    stand.launcher.close()


def test_a_launch_that_fails_behind_one_that_runs_is_repeated_with_the_tokens_of_that_one(stand: Stand) -> None:
    stand.start()
    stand.device.fail = lambda batch: len(batch.from_previous) > 0
    second = stand.start()
    assert second.batch.from_previous
    stand.device.gate.set()
    assert stand.complete(stand.take()) == {1: (12,), 2: (22,), 3: (32,)}
    ended = stand.take()
    assert not results_of(ended).errors and results_of(ended).first_error is not None
    assert stand.complete(ended) == {1: (13,), 2: (23,), 3: (33,)}
    stand.device.fail = lambda batch: False
    stand.start()
    assert stand.complete(stand.take()) == {1: (14,), 2: (24,), 3: (34,)}
    stand.launcher.close()


def test_prompts_that_fail_are_run_in_parts_once_the_results_before_them_were_read() -> None:
    """Their parts need no token of the launch before, but the buffer that its tokens lie in."""
    stand = Stand(device=TwoBuffers(), max_tokens=1)
    stand.start()
    stand.ask((4, 5, 6), 1)
    stand.device.fail = lambda batch: batch.num_seqs > 1
    second = stand.start()
    assert second.batch.num_seqs == 3 and not second.batch.from_previous
    time.sleep(0.05)
    assert len(stand.device.submitted) == 2, "parts were submitted before the results were read"
    stand.device.gate.set()
    assert stand.complete(stand.take()) == {1: (12,), 2: (22,), 3: (32,)}
    assert stand.complete(stand.take()) == {4: (42,), 5: (52,), 6: (62,)}
    stand.launcher.close()


def test_results_that_never_arrive_fail_every_row_of_their_launch(stand: Stand) -> None:
    stand.device.gate.set()
    stand.device.fail_wait = lambda batch: not batch.from_previous
    stand.start()
    stand.start()
    first, second = stand.take(), stand.take()
    assert set(results_of(first).errors) == {0, 1, 2}
    assert stand.complete(first) == {}
    assert stand.complete(second) == {}
    stand.launcher.close()


def test_the_time_of_a_launch_begins_when_the_one_before_it_has_ended() -> None:
    stand = Stand(timeout_s=0.4)
    stand.start()
    time.sleep(0.25)
    stand.start()
    stand.device.gate.set()
    stand.complete(stand.take())
    stand.device.gate.clear()
    left_s = stand.launcher.time_left_s()
    assert left_s is None or left_s > 0
    stand.device.gate.set()
    stand.complete(stand.take())
    stand.launcher.close()


def test_a_launch_that_does_not_return_is_a_lost_device() -> None:
    stand = Stand(timeout_s=0.05)
    stand.start()
    time.sleep(0.06)
    ended = stand.launcher.take_ended()
    assert ended is not None and isinstance(ended.outcome, DeviceLost)
    stand.device.gate.set()
    stand.launcher.close()
