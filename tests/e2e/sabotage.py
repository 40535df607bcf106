"""A worker in this process, served over gRPC like any other, whose pages a test can reach behind everybody's back."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import tokenizers

from register_qa import Question, Register
from tests.e2e.client import Answer, Client
from worker_service.bootstrap import running
from worker_service.compute import prepare
from worker_service.config import WorkerConfig
from worker_service.core.batch import Batch
from worker_service.core.state_rows import StateRows
from worker_service.gpu.page_pools import PagePools
from worker_service.model.runner import Runner, RunningLaunch
from worker_service.model.tokenizer import TOKENIZER

PAGE = 16
FULL = 0
MAX_ANSWER_TOKENS = 48


class WatchedRunner:
    """The worker's runner; it remembers in which pages of each group the launches found their only sequence, and which
    slots of states they read and wrote."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.launches: list[list[list[int]]] = []
        self.states: list[tuple[StateRows | None, ...]] = []

    @property
    def last_table(self) -> list[int]:
        return self.launches[-1][FULL]

    def submit(self, batch: Batch) -> RunningLaunch:
        assert batch.num_seqs == 1, "one request at a time, or nobody knows whose pages these are"
        num_pages = max(batch.table_widths)
        self.launches.append([table[:num_pages].tolist() for table in batch.block_tables])
        self.states.append(batch.states)
        return self._runner.submit(batch)

    def set_previous(self, token_ids: Sequence[int]) -> None:
        self._runner.set_previous(token_ids)


class Cached(NamedTuple):
    """A register whose whole pages are on the device, under one tenant's salt."""

    register: Register
    prefix: list[int]
    page_ids: list[int]
    salt: str


class Stand(NamedTuple):
    """The worker's pages, and the client that asks it."""

    client: Client
    address: str
    pages: PagePools
    tokenizer: tokenizers.Tokenizer
    runner: WatchedRunner

    async def cache(self, register: Register, salt: str) -> Cached:
        """Have the register computed and kept."""
        prefix = self.tokenizer.encode(register.text).ids
        await self.client.generate(self.address, prefix, 1, salt=salt)
        return Cached(register, prefix, self.runner.last_table[: len(prefix) // PAGE], salt)

    async def ask(self, cached: Cached, question: Question) -> Answer:
        """The register must really come from its pages, all of them."""
        prompt = self.tokenizer.encode(cached.register.text + question.text).ids
        answer = await self.client.generate(self.address, prompt, MAX_ANSWER_TOKENS, salt=cached.salt, ignore_eos=False)
        num_pages = len(cached.page_ids)
        assert answer.usage.cached_tokens >= num_pages * PAGE, answer.usage
        assert self.runner.last_table[:num_pages] == cached.page_ids
        return answer

    def pages_of(self, cached: Cached, question: Question) -> list[int]:
        """Where, in the register, the pages stand that tell what is asked; empty when one of them is not whole."""
        offsets = self.tokenizer.encode(cached.register.text).offsets
        numbers: set[int] = set()
        for asked in question.facts:
            line = asked.place.line
            tokens = [at for at, (start, end) in enumerate(offsets) if start < line.end and end > line.start]
            numbers |= set(range(tokens[0] // PAGE, tokens[-1] // PAGE + 1))
        return sorted(numbers) if max(numbers) < len(cached.page_ids) else []


@asynccontextmanager
async def open_stand(client: Client, cache: str, model: Path, **settings: Any) -> AsyncIterator[Stand]:
    """A worker of this cache service, alone on its pages."""
    gc.collect()  # the stand before is in reference cycles: without this, twelve tests took 2.3 GB instead of 1.2
    addresses = {"cache": cache, "listen": "127.0.0.1:0", "admin_listen": ""}
    usual = {"device": "cpu", "threads": 1, "pool_mb": 64, "page_tokens": PAGE}
    config = WorkerConfig(str(model), **{**addresses, **usual, **settings})
    compute = prepare(config)
    watched = WatchedRunner(compute.runner)
    async with running(config, compute._replace(runner=cast(Runner, watched))) as service:
        await service.engine.connected.wait()
        tokenizer = tokenizers.Tokenizer.from_file(str(model / TOKENIZER))
        yield Stand(client, str(service.address), compute.pools, tokenizer, watched)
