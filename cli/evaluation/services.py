"""What an evaluation works with: the services, workers with settings of their own, and asking one question."""

from __future__ import annotations

import asyncio
import secrets
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cli.addresses import LOOPBACK, free_port
from cli.client import Answer, StemcacheClient, sentence
from cli.cluster import Cluster, ClusterOptions, start_worker
from cli.evaluation.result import Reply
from cli.evaluation.sheets import Asked, Sheet
from cli.supervisor import Supervisor
from cli.waiting import wait_for_host_tokens

MAX_ANSWER_TOKENS = 48
# Registers in turn: few enough to be in the host tier together, enough that a small pool has dropped each before its
# turn comes again.
IN_TURN = 4
SMALL_BUDGET = 128
LAUNCHES = "stemcache_worker_launch_seconds_count"
METRICS_TIMEOUT_S = 10.0


class SpecialWorker(NamedTuple):
    """A worker that was started for some rows only. `metrics` is its endpoint's host:port."""

    client: StemcacheClient
    address: str
    metrics: str

    async def num_launches(self) -> int:
        """Forward passes so far."""
        return await asyncio.to_thread(_metric, self.metrics, LAUNCHES)


@dataclass(slots=True)
class EvalServices:
    """Two ordinary workers, and special ones, started on first use; `advance` is called after every answer."""

    client: StemcacheClient
    supervisor: Supervisor
    cluster: Cluster
    options: ClusterOptions
    sheets: Sequence[Sheet]
    page_tokens: int
    advance: Callable[[], None] = lambda: None
    _special: dict[str, SpecialWorker] = field(default_factory=dict)

    @property
    def first(self) -> str:
        return self.cluster.workers[0]

    @property
    def second(self) -> str:
        return self.cluster.workers[1]

    @property
    def tight_pages(self) -> int:
        """A pool that holds one longest prompt with its answer, and nothing else.

        Two pages at least for the answer: a neighbour that shares the register ends in a page of its own.
        """
        prompt_pages = -(-max(sheet.longest for sheet in self.sheets) // self.page_tokens)
        return prompt_pages + max(-(-MAX_ANSWER_TOKENS // self.page_tokens), 2)

    async def tight_worker(self) -> SpecialWorker:
        """Its pool holds one register only. Without pages ahead, a request lacks one at a token that is known."""
        pages = self.tight_pages
        env = {"POOL_PAGES": pages, "POOL_MB": 0, "MAX_MODEL_LEN": pages * self.page_tokens, "DECODE_AHEAD_TOKENS": 0}
        return await self._special_worker("worker-tight", {name: str(value) for name, value in env.items()})

    async def chunking_worker(self) -> SpecialWorker:
        """It computes SMALL_BUDGET tokens in a launch at the most."""
        env = {"TOKEN_BUDGET": str(SMALL_BUDGET), "MAX_NUM_SEQS": "16"}
        return await self._special_worker("worker-chunks", env)

    async def _special_worker(self, name: str, settings: dict[str, str]) -> SpecialWorker:
        if name not in self._special:
            metrics = f"{LOOPBACK}:{free_port()}"
            env = {f"STEMCACHE_WORKER_{key}": value for key, value in {**settings, "METRICS_LISTEN": metrics}.items()}
            address = await start_worker(self.supervisor, self.cluster, self.options, name, env)
            self._special[name] = SpecialWorker(StemcacheClient(self.cluster.cache, (address,)), address, metrics)
        return self._special[name]

    async def close(self) -> None:
        for special in self._special.values():
            await special.client.close()

    def client_of(self, worker: str) -> StemcacheClient:
        found = [special.client for special in self._special.values() if special.address == worker]
        return found[0] if found else self.client

    async def ask(self, worker: str, sheet: Sheet, asked: Asked, salt: str, *, reuses: bool = True) -> Reply:
        """One question on one worker, answered greedily until the model ends its sentence.

        Counts in the progress bar.
        """
        reply = await self.try_asking(worker, sheet, asked, salt)
        self.advance()
        return reply._replace(reuses=reuses)

    async def try_asking(self, worker: str, sheet: Sheet, asked: Asked, salt: str) -> Reply:
        """As `ask`, for an attempt that may have to be repeated."""
        sent_s = time.perf_counter()
        sampling = sentence(MAX_ANSWER_TOKENS)
        answer = await self.client_of(worker).generate(worker, asked.prompt, sampling, salt=salt)
        return Reply(sheet, asked, answer, True, sent_s)

    async def prime(self, worker: str, sheet: Sheet, salt: str) -> Answer:
        """Has the register computed there, without a question."""
        return await self.client_of(worker).generate(worker, sheet.prefix, sentence(1), salt=salt)

    async def spill(self, sheet: Sheet, salt: str) -> int:
        """Has the first worker compute the register and spill it. Returns how many of its tokens others can fetch now.

        Twice: what is used once is not worth spilling.
        """
        for _ in range(2):
            await self.prime(self.first, sheet, salt)
        # The last token's page is full only when the register ends with it, and one token is computed anyway.
        wanted = (len(sheet.prefix) - 1) // self.page_tokens * self.page_tokens
        return await wait_for_host_tokens(self.client, self.second, sheet.prefix, wanted, salt)

    async def on_both(self, per_sheet: Callable[[str, Sheet], Awaitable[list[Reply]]]) -> list[Reply]:
        """Every second sheet on each of the two workers, which work side by side."""

        async def share(number: int, worker: str) -> list[Reply]:
            return [reply for sheet in self.sheets[number::2] for reply in await per_sheet(worker, sheet)]

        shares = await asyncio.gather(*(share(number, worker) for number, worker in enumerate(self.cluster.workers)))
        return [reply for replies in shares for reply in replies]

    def in_turn(self) -> list[Sequence[Sheet]]:
        """The sheets in parts of IN_TURN and more: the last part takes what is left over."""
        starts = range(0, max(len(self.sheets) // IN_TURN, 1) * IN_TURN, IN_TURN)
        ends = [*starts[1:], len(self.sheets)]
        return [self.sheets[start:end] for start, end in zip(starts, ends, strict=True)]


def fresh_salt(way: str) -> str:
    """Returns a new salt for this way, so that its namespace is empty."""
    return f"eval-{way}-{secrets.token_hex(8)}"


def _metric(address: str, name: str) -> int:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=METRICS_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith(f"{name} "))))
