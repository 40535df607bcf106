"""What a user of the services would write: generate, cancel, ask for counts."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc
import grpc.aio

from protos.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES

CALL_S = 60.0


class Answer(NamedTuple):
    tokens: list[int]
    text: str
    usage: worker_pb2.Usage
    logprobs: tuple[float, ...] = ()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Cached, fetched and computed tokens of the prompt."""
        return self.usage.cached_tokens, self.usage.fetched_tokens, self.usage.computed_tokens

    @property
    def varied_tokens(self) -> list[int]:
        """The tokens; fails where they are few tokens in turn, which would show nothing."""
        assert len(set(self.tokens)) > 5, "an answer of a few tokens in turn shows nothing"
        return self.tokens


def unused_salt() -> str:
    """A namespace that nobody used: the request runs cold."""
    return secrets.token_hex(8)


class Client:
    """Channels to a cache service and workers, by address."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, MAX_MESSAGE_BYTES)
        return self._channels[address]

    def worker(self, address: str) -> worker_pb2_grpc.ModelWorkerAsyncStub:
        return worker_pb2_grpc.ModelWorkerStub(self._channel(address))  # type: ignore[return-value]

    def cache(self, address: str) -> cache_pb2_grpc.PrefixCacheAsyncStub:
        return cache_pb2_grpc.PrefixCacheStub(self._channel(address))  # type: ignore[return-value]

    def cache_admin(self, address: str) -> cache_pb2_grpc.CacheAdminAsyncStub:
        return cache_pb2_grpc.CacheAdminStub(self._channel(address))  # type: ignore[return-value]

    def worker_admin(self, address: str) -> worker_pb2_grpc.WorkerAdminAsyncStub:
        return worker_pb2_grpc.WorkerAdminStub(self._channel(address))  # type: ignore[return-value]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def generate(
        self,
        worker: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        salt: str = "",
        ignore_eos: bool = True,
        logprobs: bool = False,
        on_token: Callable[[int], None] = lambda count: None,
    ) -> Answer:
        """Greedy, without an early end unless asked for; `on_token` hears how many tokens there are so far."""
        tokens, text, usage, told = array("i"), "", worker_pb2.Usage(), list[float]()
        call = self.stream(worker, prompt, max_tokens, salt=salt, ignore_eos=ignore_eos, logprobs=logprobs)
        async for response in call:
            tokens.frombytes(response.token_ids)
            text += response.text
            told += [entry.logprob for entry in response.logprobs]
            if response.finish_reason:
                usage = response.usage
            on_token(len(tokens))
        return Answer(tokens.tolist(), text, usage, tuple(told))

    async def cold(self, worker: str, prompt: Sequence[int], max_tokens: int = 8) -> Answer:
        """The answer of a run that reuses nothing; fails where it did."""
        answer = await self.generate(worker, prompt, max_tokens, salt=unused_salt())
        assert answer.usage.num_preemptions == 0, "the cold run was preempted"
        assert answer.counts == (0, 0, len(prompt)), "the cold run was not cold"
        return answer

    def stream(
        self,
        worker: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        ignore_eos: bool = True,
        logprobs: bool = False,
    ) -> grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]:
        sampling = worker_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        if logprobs:
            sampling.logprobs = 0
        token_ids = worker_pb2.TokenIds(ids=array("i", prompt).tobytes())
        request = worker_pb2.GenerateRequest(token_ids=token_ids, sampling=sampling, salt=salt)
        return self.worker(worker).Generate(request, timeout=CALL_S)

    async def stats(self, cache: str) -> cache_pb2.StatsResponse:
        return await self.cache(cache).Stats(cache_pb2.StatsRequest(), timeout=CALL_S)

    async def worker_stats(self, cache: str, name: str) -> cache_pb2.WorkerStats:
        found = [worker for worker in (await self.stats(cache)).workers if worker.worker_id == name]
        return found[0] if found else cache_pb2.WorkerStats()

    async def until(
        self, cache: str, holds: Callable[[cache_pb2.StatsResponse], bool], timeout_s: float = 30.0
    ) -> cache_pb2.StatsResponse:
        """The first stats for which it holds; fails with the last ones seen."""
        stats = cache_pb2.StatsResponse()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    stats = await self.stats(cache)
                    if holds(stats):
                        return stats
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"did not come about within {timeout_s} s: {stats}") from None

    async def idle(self, cache: str) -> cache_pb2.StatsResponse:
        """Wait until no worker holds a lease or has a ticket open."""
        return await self.until(cache, nothing_is_held)


def nothing_is_held(stats: cache_pb2.StatsResponse) -> bool:
    return all(worker.num_leases == 0 and worker.num_tickets == 0 for worker in stats.workers)


@asynccontextmanager
async def open_client() -> AsyncIterator[Client]:
    client = Client()
    try:
        yield client
    finally:
        await client.close()
