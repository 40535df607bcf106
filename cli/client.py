"""A client of both services, as a user of Stemcache would write one: generate, retry elsewhere, ask the cache.

Formatting is the callers' job.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import cache_pb2, cache_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from rpc.client import open_channel
from session.limits import MAX_MESSAGE_BYTES

CALL_TIMEOUT_S = 30.0
GENERATE_TIMEOUT_S = 300.0
PROBE_TIMEOUT_S = 2.0
PREFIX_CACHE = cache_pb2.DESCRIPTOR.services_by_name["PrefixCache"].full_name
CACHE_ADMIN = cache_pb2.DESCRIPTOR.services_by_name["CacheAdmin"].full_name
MODEL_WORKER = worker_pb2.DESCRIPTOR.services_by_name["ModelWorker"].full_name
NAMES = {
    PREFIX_CACHE: "the cache service",
    CACHE_ADMIN: "the cache service's admin address",
    MODEL_WORKER: "a worker",
}
# Another worker may serve what one could not. Not CANCELLED: a server cancels calls in a burst, and a client that asks
# again at once makes the burst longer.
RETRIED = (grpc.StatusCode.UNAVAILABLE,)


class WrongService(Exception):
    """The service at this address is not the one that was meant."""


@dataclass(slots=True)
class Answer:
    """A finished generation. `first_token_s` is what the client measured from sending to the first token."""

    worker: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    finish_reason: worker_pb2.FinishReason.ValueType = worker_pb2.FINISH_REASON_UNSPECIFIED
    usage: worker_pb2.Usage = field(default_factory=worker_pb2.Usage)
    logprobs: list[worker_pb2.TokenLogprobs] = field(default_factory=list)
    retries: int = 0


class StemcacheClient:
    """Channels to one cache service, its workers and its admin address. Close it, or use it as an async context."""

    def __init__(self, cache: str, workers: Sequence[str], cache_admin: str = "") -> None:
        self.cache = cache
        self.cache_admin = cache_admin
        self.workers = tuple(workers)
        self._channels = {
            address: open_channel(address, MAX_MESSAGE_BYTES)
            for address in dict.fromkeys((cache, cache_admin, *workers))
            if address
        }
        self._models = {w: worker_pb2_grpc.ModelWorkerStub(self._channels[w]) for w in workers}
        self._cache_stub = cache_pb2_grpc.PrefixCacheStub(self._channels[cache]) if cache else None
        self._admin_stub = cache_pb2_grpc.CacheAdminStub(self._channels[cache_admin]) if cache_admin else None

    async def __aenter__(self) -> StemcacheClient:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raises WrongService for a call that failed since its service is not at that address."""
        try:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                await self._check_services()
        finally:
            await self.close()

    async def _check_services(self) -> None:
        meant = [(self.cache, PREFIX_CACHE)] if self.cache else []
        meant += [(self.cache_admin, CACHE_ADMIN)] if self.cache_admin else []
        for address, service in [*meant, *((worker, MODEL_WORKER) for worker in self.workers)]:
            if await self._serves(address, service) is False:
                other = MODEL_WORKER if service == PREFIX_CACHE else PREFIX_CACHE
                found = NAMES[other] if await self._serves(address, other) else "something else"
                raise WrongService(f"{address} is {found}, not {NAMES[service]}")

    async def _serves(self, address: str, service: str) -> bool | None:
        """Returns whether this service is at `address`; None when nothing replies."""
        stub = health_pb2_grpc.HealthStub(self._channels[address])
        try:
            await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return False if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED) else None
        return True

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def generate(
        self,
        worker: str,
        prompt: str | Sequence[int],
        sampling: worker_pb2.SamplingParams,
        *,
        salt: str = "",
        priority: int = 0,
        on_answer: Callable[[Answer], None] = lambda _: None,
    ) -> Answer:
        """Returns one worker's answer; calls `on_answer` with the growing answer after each message.

        Raises grpc.RpcError.
        """
        request = worker_pb2.GenerateRequest(sampling=sampling, salt=salt, priority=priority)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids = array("i", prompt).tobytes()
        answer, start = Answer(worker), time.perf_counter()
        async for response in self._models[worker].Generate(request, timeout=GENERATE_TIMEOUT_S):
            new_tokens = array("i", response.token_ids)
            if new_tokens and not answer.token_ids:
                answer.first_token_s = time.perf_counter() - start
            answer.token_ids.extend(new_tokens)
            answer.text += response.text
            answer.logprobs.extend(response.logprobs)
            if response.finish_reason:
                answer.finish_reason, answer.usage = response.finish_reason, response.usage
            on_answer(answer)
        return answer

    async def generate_with_retry(
        self,
        workers: Sequence[str],
        prompt: str | Sequence[int],
        sampling: worker_pb2.SamplingParams,
        *,
        on_answer: Callable[[Answer], None] = lambda _: None,
    ) -> Answer:
        """Tries the workers in order until one finishes; goes on after an unreachable worker, not after bad input."""
        for attempt, worker in enumerate(workers):
            try:
                answer = await self.generate(worker, prompt, sampling, on_answer=on_answer)
            except grpc.RpcError as error:
                if attempt + 1 == len(workers) or error.code() not in RETRIED:
                    raise
            else:
                answer.retries = attempt
                return answer
        raise ValueError("workers: at least one is needed")

    async def healthy_worker(self) -> str:
        """Returns the first worker that is serving, else the first one, whose error will say what is wrong."""
        for worker in self.workers:
            if await self.is_serving(worker):
                return worker
        return self.workers[0]

    async def tokenize(self, worker: str, text: str, salt: str = "") -> worker_pb2.TokenizeResponse:
        return await self._models[worker].Tokenize(
            worker_pb2.TokenizeRequest(text=text, salt=salt), timeout=CALL_TIMEOUT_S
        )

    async def describe(self, worker: str) -> worker_pb2.DescribeResponse:
        return await self._models[worker].Describe(worker_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)

    async def stats(self) -> cache_pb2.StatsResponse:
        return await self._cache().Stats(cache_pb2.StatsRequest(), timeout=CALL_TIMEOUT_S)

    async def explain(self, namespace: types_pb2.Namespace, tokens: bytes) -> cache_pb2.ExplainResponse:
        request = cache_pb2.ExplainRequest(namespace=namespace, tokens=tokens)
        return await self._cache().Explain(request, timeout=CALL_TIMEOUT_S)

    async def explain_pages(
        self, attachment: int, page_ids: bytes, salt: str, adapter: str
    ) -> cache_pb2.ExplainResponse:
        """Of one attached engine, or with 0 of all. Without page ids its last Lookup that missed is explained."""
        if attachment and not page_ids:
            request = cache_pb2.ExplainRequest(attachment=attachment)
            return await self._cache().Explain(request, timeout=CALL_TIMEOUT_S)
        models = [""] if attachment else sorted({one.model for one in (await self.stats()).attachments.engines})
        told = cache_pb2.ExplainResponse()
        for model in models:
            namespace = types_pb2.Namespace(model=model, adapter=adapter, salt=salt)
            request = cache_pb2.ExplainRequest(namespace=namespace, page_ids=page_ids, attachment=attachment)
            told.MergeFrom(await self._cache().Explain(request, timeout=CALL_TIMEOUT_S))
        return told

    async def match(self, namespace: types_pb2.Namespace, tokens: bytes) -> cache_pb2.MatchResponse:
        return await self._cache().Match(
            cache_pb2.MatchRequest(namespace=namespace, tokens=tokens), timeout=CALL_TIMEOUT_S
        )

    async def pin(self, namespace: types_pb2.Namespace, tokens: bytes, ttl_ms: int) -> cache_pb2.PinResponse:
        request = cache_pb2.PinRequest(namespace=namespace, tokens=tokens, ttl_ms=ttl_ms)
        return await self._admin().Pin(request, timeout=CALL_TIMEOUT_S)

    async def clear(
        self, namespace: types_pb2.Namespace | None, *, unused_only: bool, dry_run: bool = False
    ) -> cache_pb2.ClearResponse:
        request = cache_pb2.ClearRequest(namespace=namespace, unused_only=unused_only, dry_run=dry_run)
        return await self._admin().Clear(request, timeout=CALL_TIMEOUT_S)

    async def is_serving(self, address: str) -> bool:
        """Returns whether the health check of the service at `address` says SERVING."""
        stub = health_pb2_grpc.HealthStub(self._channels[address])
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _admin(self) -> cache_pb2_grpc.CacheAdminAsyncStub:
        if self._admin_stub is None:
            raise ValueError("cache_admin: no address was given")
        return self._admin_stub

    def _cache(self) -> cache_pb2_grpc.PrefixCacheAsyncStub:
        if self._cache_stub is None:
            raise ValueError("cache: no address was given")
        return self._cache_stub


def greedy(max_tokens: int) -> worker_pb2.SamplingParams:
    """Returns greedy sampling of exactly `max_tokens` tokens."""
    return worker_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def sentence(max_tokens: int) -> worker_pb2.SamplingParams:
    """Returns greedy sampling until the model ends its answer; `max_tokens` at the most."""
    return worker_pb2.SamplingParams(max_tokens=max_tokens)


async def wait_serving(address: str) -> None:
    """Waits until the service at `address` is healthy. Has no timeout of its own."""
    while True:
        async with StemcacheClient(address, ()) as client:  # a fresh channel: no connection backoff
            if await client.is_serving(address):
                return
        await asyncio.sleep(0.1)
