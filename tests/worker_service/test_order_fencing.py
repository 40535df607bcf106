"""A real engine and a real cache service, and sessions renewed all the time: no page is written under another key."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable

from cache_service.bootstrap import running
from cache_service.config import CacheConfig
from cache_service.core.base.page_hash import namespace_digest, page_hashes
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES
from session.messages import Ack, Hello
from session.words import GroupKind, GroupSpec, HostTierKind, Namespace, Transfer, TransferStatus, WorkerId
from tests.worker_service.engine_harness import NAMESPACE, PAGE, VOCAB, Letters, ToyRunner, collect, reference
from tests.worker_service.serial_runner import SerialRunner
from worker_service.cache_client import CacheClient, ClientLimits
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler import Scheduler
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.engine import Engine, EngineRequest
from worker_service.launch.launcher import Launcher
from worker_service.observer import Observer

GROUPS = (GroupSpec("full", GroupKind.FULL, 40, 0),)
NUM_REQUESTS = 300
HELLO_EVERY = 5


class SlowMover:
    """Spills page by page into `store`, reading each page when its turn comes; fetches fail, as with an open breaker.

    An order that starts after the drain before a Hello is late: its pages may be others' by the time it reads them.
    """

    def __init__(self, on_ack: Callable[[Ack], None], memory: dict[int, int], rng: random.Random) -> None:
        self._on_ack = on_ack
        self._memory = memory
        self._rng = rng
        self._running: set[asyncio.Task[None]] = set()
        self.store: dict[bytes, tuple[int | None, ...]] = {}
        self.is_hung_up = self.is_drained = False
        self.num_spills = self.num_late = 0

    def fetch(self, transfer: Transfer, barrier: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(self._on_ack, Ack(transfer.ticket, 0, TransferStatus.FAILED))

    def spill(self, transfer: Transfer) -> None:
        self.num_spills += 1
        self.num_late += self.is_drained
        task = asyncio.create_task(self._write(transfer, 0.02 if self.is_drained else 0))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _write(self, transfer: Transfer, pause_s: float) -> None:
        for moved in transfer.groups:
            for number, page in enumerate(array("I", moved.page_ids)):
                await asyncio.sleep(pause_s * self._rng.random())
                content = tuple(self._memory.get(page * PAGE + offset) for offset in range(PAGE))
                self.store[moved.key(number, 0)] = content
        self._on_ack(Ack(transfer.ticket, transfer.num_pages, TransferStatus.DONE, 1, 1.0))

    async def drain(self) -> None:
        while self._running:
            await asyncio.wait(set(self._running))
        await asyncio.sleep(0)
        self.is_drained = self.is_hung_up

    async def close(self) -> None:
        await self.drain()


class NotingClient(CacheClient):
    """Tells the mover when a new stream is there: from then on orders are this session's."""

    mover: SlowMover

    async def connect(self, generation: int):  # type: ignore[no-untyped-def]
        welcome = await super().connect(generation)
        self.mover.is_hung_up = self.mover.is_drained = False
        return welcome

    async def disconnect(self) -> None:
        await super().disconnect()
        self.mover.is_hung_up = True


async def test_content_under_a_key_is_never_overwritten() -> None:
    rng = random.Random(1)
    settings = CacheConfig(listen="127.0.0.1:0", spill="write_through", transfer_pages=1, fetch="always")
    truth: dict[bytes, tuple[int, ...]] = {}
    async with running(settings) as service:
        tier = (HostTierKind.SHARED, "tier")
        hello = Hello(WorkerId("w"), "127.0.0.1:1", "i0", b"f" * 32, PAGE, GROUPS, *tier, model=NAMESPACE.model)
        client = NotingClient(
            lambda: open_channel(str(service.address), MAX_MESSAGE_BYTES), lambda: hello, ClientLimits()
        )
        scheduler = Scheduler(
            SchedulerConfig(PAGE, GROUPS, max_model_len=200, vocab_size=VOCAB, token_budget=64, max_num_seqs=8)
        )
        runner = ToyRunner()

        def make_mover(on_ack: Callable[[Ack], None]) -> SlowMover:
            client.mover = SlowMover(on_ack, runner.memory, rng)
            return client.mover

        engine = Engine(scheduler, client, Launcher(SerialRunner(runner.run)), make_mover, Observer())
        task = asyncio.create_task(engine.run())
        for number in range(NUM_REQUESTS):
            prompt = rng.choices(range(VOCAB), k=rng.choice((24, 40)))
            asked = engine.submit(
                EngineRequest(NAMESPACE, array("i", prompt).tobytes(), SamplingParams(max_tokens=3)), Letters()
            )
            await asyncio.sleep(rng.random() * 0.006)
            if number % HELLO_EVERY == 0:
                engine.reconnect_soon()
            answer = (await collect(asked)).token_ids
            assert answer == reference(prompt, 3)
            note(truth, prompt + answer)
        engine.stop()
        await task
    mover = client.mover
    assert mover.num_spills > NUM_REQUESTS
    assert mover.num_late == 0
    checked = [key for key in mover.store if key_hash(key) in truth]
    assert len(checked) > NUM_REQUESTS
    assert all(mover.store[key] == truth[key_hash(key)] for key in checked)


def note(truth: dict[bytes, tuple[int, ...]], tokens: list[int]) -> None:
    """What each whole page of this prefix holds, by its hash."""
    whole = array("i", tokens[: len(tokens) // PAGE * PAGE])
    hashes = page_hashes(namespace_digest(Namespace(NAMESPACE.model)), b"", whole.tobytes(), PAGE * 4)
    for page in range(len(hashes) // 32):
        truth[hashes[32 * page : 32 * page + 32].hex().encode()] = tuple(whole[page * PAGE : (page + 1) * PAGE])


def key_hash(key: bytes) -> bytes:
    return key.rpartition(b":")[2]
