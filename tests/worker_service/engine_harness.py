"""An Engine on the real cache manager, with a model that reads what each slot holds, and transfers that carry nothing.

The runner reads what attention would read, through the block tables it is given; a token is a function of all of that,
so a wrong page shows as a wrong answer.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from session.messages import Ack, Step, StepReply, Welcome
from session.words import GroupKind, GroupSpec, Namespace, Transfer, TransferStatus
from tests.worker_service.audited_manager import WORKER, AuditedManager
from tests.worker_service.serial_runner import SerialRunner
from worker_service.core.batch import Batch
from worker_service.core.errors import SessionLost
from worker_service.core.runner_port import LaunchTokens
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.engine import Engine, EngineRequest
from worker_service.launch.launcher import Launcher
from worker_service.observer import Observer
from worker_service.output_stream import OutputStream, Piece

PAGE = 4
VOCAB = 26
NAMESPACE = Namespace("toy")


def mark_of(tokens: Sequence[int]) -> int:
    mark = 7
    for token in tokens:
        mark = (mark * 1_000_003 + token + 1) % (1 << 61)
    return mark


def next_token(tokens: Sequence[int]) -> int:
    return mark_of(tokens) // 7 % VOCAB


def reference(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class ToyRunner:
    """`gate`, when set, holds each launch until it is opened; `fail_when` makes a launch raise."""

    memory: dict[int, int] = field(default_factory=dict)
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)
    fail_when: Callable[[Batch], bool] = lambda batch: False
    num_launches: int = 0
    num_tokens: int = 0

    def run(self, batch: Batch) -> LaunchTokens:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(30), "the gate was never opened"
        self.num_launches += 1
        self.num_tokens += batch.num_tokens
        for token, slot in zip(batch.token_ids, batch.slot_mapping[0], strict=True):
            self.memory[slot] = token
        if self.fail_when(batch):
            raise RuntimeError("out of luck")
        tokens = tuple(next_token(self._keys(batch, entry.row)) for entry in batch.sampled)
        return LaunchTokens(tokens, (None,) * len(tokens))

    def _keys(self, batch: Batch, row: int) -> list[int]:
        length = batch.cu_seqlens_k[row + 1] - batch.cu_seqlens_k[row]
        width = batch.table_widths[0]
        table = batch.block_tables[0][row * width : (row + 1) * width]
        return [self.memory[table[at // PAGE] * PAGE + at % PAGE] for at in range(length)]


class ToyMover:
    """Carries nothing: spills are done, fetches fail at once, as with an open breaker."""

    def __init__(self, on_ack: Callable[[Ack], None]) -> None:
        self._on_ack = on_ack
        self.orders: list[Transfer] = []
        self.fetches: list[Transfer] = []

    def fetch(self, transfer: Transfer, barrier: Callable[[], None]) -> None:
        self.fetches.append(transfer)
        asyncio.get_running_loop().call_soon(self._on_ack, Ack(transfer.ticket, 0, TransferStatus.FAILED))

    def spill(self, transfer: Transfer) -> None:
        self.orders.append(transfer)
        asyncio.get_running_loop().call_soon(
            self._on_ack, Ack(transfer.ticket, transfer.num_pages, TransferStatus.DONE, 1, 1.0)
        )

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self.drain()


class ToyCache:
    """CachePort on a manager. `lose_before` and `lose_after` break the session at that many steps from now."""

    def __init__(self, groups: tuple[GroupSpec, ...], *, host: bool) -> None:
        self.manager = AuditedManager(groups, PAGE, host=host)
        self.num_hellos = 0
        self.acks: list[Ack] = []
        self.steps: list[Step] = []
        self.lose_before = self.lose_after = -1
        self.on_step: Callable[[Step], None] = lambda step: None
        self.orders: asyncio.Queue[Transfer | SessionLost] = asyncio.Queue()
        self.is_up = asyncio.Event()
        self.is_up.set()
        self.said_goodbye = False
        self.is_hung_up = True
        self._session = ""

    def restart(self) -> None:
        """A new manager that knows nobody; the session to the old one is gone."""
        old = self.manager
        epoch = f"epoch-{int(old.epoch.partition('-')[2]) + 1}"
        self.manager = AuditedManager(old.groups, PAGE, epoch, host=old.has_host, limits=old.limits)

    async def connect(self, generation: int) -> Welcome:
        assert self.is_hung_up, "one stream at a time"
        await self.is_up.wait()
        self.num_hellos += 1
        self.is_hung_up = False
        self._session = self.manager.epoch
        return self.manager.hello(generation)

    async def step(self, step: Step) -> StepReply:
        self._check()
        self.on_step(step)
        await asyncio.sleep(0)
        if self.lose_before == 0:
            self.lose_before = -1
            raise SessionLost("before the step arrived")
        self.lose_before -= self.lose_before > 0
        self.acks += step.acks
        self.steps.append(step)
        # Some spill orders are the tests' own.
        known = self.manager.cache.transfers
        acks = tuple(ack for ack in step.acks if known.was_issued(ack.ticket))
        reply = self.manager.step(step._replace(acks=acks))
        for order in self.manager.manager.take_orders(WORKER):
            self.orders.put_nowait(order)
        if self.lose_after == 0:
            self.lose_after = -1
            raise SessionLost("before the reply arrived")
        self.lose_after -= self.lose_after > 0
        return reply

    async def next_order(self) -> Transfer:
        order = await self.orders.get()
        if isinstance(order, SessionLost):
            raise order
        return order

    async def disconnect(self) -> None:
        self.is_hung_up = True
        while not self.orders.empty():
            self.orders.get_nowait()

    async def close(self) -> None:
        self.said_goodbye = True

    def _check(self) -> None:
        if self.is_hung_up or self._session != self.manager.epoch:
            raise SessionLost("that manager is gone")


class Letters:
    """Token n is the nth letter."""

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)

    def finish(self) -> str:
        return ""


@dataclass
class EngineHarness:
    engine: Engine
    cache: ToyCache
    runner: ToyRunner
    mover: ToyMover
    task: asyncio.Task[None]

    def ask(self, prompt: Sequence[int], max_tokens: int = 8, **params: object) -> OutputStream:
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        return self.engine.submit(EngineRequest(NAMESPACE, array("i", prompt).tobytes(), sampling), Letters())

    async def settled(self) -> None:
        """Until nothing runs and nothing is left to say."""
        async with asyncio.timeout(20):
            while self.engine.scheduler.num_unfinished or not self.cache.manager.is_idle:
                await asyncio.sleep(0.001)


async def collect(stream: OutputStream) -> Piece:
    """All pieces as one."""
    whole = Piece()
    async with asyncio.timeout(20):
        while whole.finish_reason is None:
            piece = await stream.next_piece()
            whole.token_ids += piece.token_ids
            whole.text += piece.text
            whole.logprobs += piece.logprobs
            whole.finish_reason, whole.usage, whole.timing = piece.finish_reason, piece.usage, piece.timing
    return whole


@asynccontextmanager
async def running_engine(
    num_pages: int = 64,
    observer: Observer | None = None,
    launch_timeout_s: float = 0.0,
    *,
    host: bool = False,
    runner: ToyRunner | None = None,
    detach_after_s: float = 0.0,
    **config: int,
):
    groups = (GroupSpec("full", GroupKind.FULL, num_pages, 64),)
    limits = {"token_budget": 16, "max_num_seqs": 8, **config}
    scheduler = Scheduler(SchedulerConfig(PAGE, groups, max_model_len=200, vocab_size=VOCAB, **limits))
    cache, runner = ToyCache(groups, host=host), runner or ToyRunner()
    movers: list[ToyMover] = []

    def make_mover(on_ack: Callable[[Ack], None]) -> ToyMover:
        movers.append(ToyMover(on_ack))
        return movers[0]

    launcher = Launcher(SerialRunner(runner.run), launch_timeout_s)
    engine = Engine(scheduler, cache, launcher, make_mover, observer or Observer(), detach_after_s)
    task = asyncio.create_task(engine.run())
    harness = EngineHarness(engine, cache, runner, movers[0], task)
    try:
        yield harness
    finally:
        if runner.gate is not None:
            runner.gate.set()
        engine.stop()
        async with asyncio.timeout(20):
            await asyncio.gather(task, return_exceptions=True)
