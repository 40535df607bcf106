"""Sessions that break at random, with the real manager: no request is lost, no answer is wrong, nothing is left.

`python -m tests.worker_service.test_session_faults --seeds N [--first S]` runs more lives than the suite does.
"""

from __future__ import annotations

import argparse
import random
import time

import pytest

from session.limits import SessionLimits
from session.messages import Step
from session.words import Namespace, SequenceId
from tests.worker_service.audited_manager import LIMITS
from tests.worker_service.layouts import MAX_LEN, full_only, with_state, with_window
from tests.worker_service.scheduler_machine import STOPPED, VOCAB, Machine
from worker_service.core.errors import LostPlace
from worker_service.core.scheduler_config import SchedulerConfig

LAYOUTS = (full_only, full_only, with_window, with_state)
MAX_TURNS = 6_000
NUM_REQUESTS = 64


class BrokenSession(Exception):
    """The step or its reply was lost."""


class Life(Machine):
    """`chaos` is the chance that a step meets a fault; faults end after a while, so that all requests can."""

    def __init__(self, config: SchedulerConfig, rng: random.Random, *, host: bool) -> None:
        self.chaos = 0.0
        self.num_lost = self.num_restarts = 0
        super().__init__(config, host=host, rng=rng)
        self.random = rng

    def exchange(self) -> bool:
        step = self.scheduler.next_step()
        if step is None:
            return False
        while step is not None:
            try:
                self.deliver(step)
                step = None
            except BrokenSession:
                step = self.reconnect()
        return True

    def deliver(self, step: Step) -> None:
        if self.random.random() >= self.chaos:
            self.apply(self.manager.step(step))
            return
        self.num_lost += 1
        if self.random.random() < 0.6:
            self.manager.step(step)
        raise BrokenSession

    def reconnect(self) -> Step | None:
        """As the engine does: the launch lands, the mover is drained, then Hello; each of them may be lost again."""
        self.drain()
        self.manager.disconnect()
        dice = self.random.random()
        if dice < 0.15:
            self.num_restarts += 1
            self.new_manager(self.other_limits())
        elif dice < 0.25:
            self.manager.forget()
        if self.random.random() < 0.2:
            self.manager.hello(self.scheduler.generation)  # its Welcome is lost
        while True:
            try:
                return self.say_hello()
            except LostPlace:
                continue

    def other_limits(self) -> SessionLimits:
        return LIMITS._replace(
            max_adopt_pages=self.random.choice([1, 20, 4096]), max_kept_bytes=self.random.choice([0, 2_000, 1 << 20])
        )


def simulate(seed: int) -> tuple[int, int]:
    """One life. Returns how many sessions were lost and how often the service restarted; a failure names its seed."""
    try:
        return _simulate(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


def _simulate(seed: int) -> tuple[int, int]:
    rng = random.Random(seed)
    page_tokens, budget = rng.choice([1, 2, 4]), rng.choice([64, 96])
    groups = rng.choice(LAYOUTS)(page_tokens, budget)
    size = rng.choice([1, 4, 12])
    config = SchedulerConfig(
        page_tokens=page_tokens,
        groups=tuple(spec._replace(num_pages=spec.num_pages * size) for spec in groups),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        token_budget=budget,
        max_num_seqs=64,
        max_acquires=rng.choice([3, 8, 64]),
        long_prefill_token_threshold=rng.choice([0, 4]),
    )
    life = Life(config, rng, host=rng.random() < 0.5)
    trunks = [[rng.randrange(3) for _ in range(18)] for _ in range(6)]
    asked: list[SequenceId] = []
    life.chaos = rng.choice([0.1, 0.3, 0.6])
    for turn in range(MAX_TURNS):
        for _ in range(rng.randrange(4)):
            if len(asked) < NUM_REQUESTS:
                prompt = rng.choice(trunks)[: rng.randint(1, 14)] + [rng.randrange(3) for _ in range(rng.randrange(4))]
                namespace = Namespace("model", salt=rng.choice(["", "", "other"]))
                asked.append(life.ask(prompt, rng.randint(1, 6), namespace, bypass_cache=rng.random() < 0.1))
        if asked and rng.random() < 0.1:
            life.stop(rng.choice(asked))
        if turn > 400:
            life.chaos = 0.0
        if not life.turn() and len(asked) == NUM_REQUESTS:
            if not life.scheduler.num_unfinished:
                break
            life.scheduler.retry_refused()
    assert not [client for client in life.clients.values() if client.failed not in ("", STOPPED)], "a request was lost"
    assert life.scheduler.num_unfinished == 0, "a request never ended"
    life.check_over()
    return life.num_lost, life.num_restarts


@pytest.mark.parametrize("seed", range(12))
def test_a_life_with_broken_sessions(seed: int) -> None:
    num_lost, _ = simulate(seed)
    assert num_lost >= 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    start_s = time.monotonic()
    lives = [simulate(seed) for seed in range(options.first, options.first + options.seeds)]
    lost, restarts = (sum(counts) for counts in zip(*lives, strict=True))
    print(f"{len(lives)} lives, {lost} sessions lost, {restarts} restarts, {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
