"""Picks the worker for a request: the one with most of the prompt cached; among equals the least loaded.

A rule of this client, made of calls that any client can make: Describe, Tokenize, Match, Stats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import grpc

from cli.client import Answer, StemcacheClient
from cli.places import cache_of_workers, find_workers
from protos.v1 import cache_pb2, types_pb2, worker_pb2

# With these the worker computes what the host tier has.
NOT_FETCHED = (
    types_pb2.MISS_REASON_FETCH_SLOWER,
    types_pb2.MISS_REASON_FETCH_BUSY,
    types_pb2.MISS_REASON_BREAKER_OPEN,
)


class Choice(NamedTuple):
    """A worker that replies, and why to pick it. A `known` one has a session with the cache service."""

    address: str
    known: bool = False
    usable_tokens: int = 0
    host_tokens: int = 0
    num_unfinished: int = 0
    num_requests: int = 0

    @property
    def rank(self) -> tuple[int, ...]:
        """Returns the sort key: the highest is taken. Requests so far come last, so that idle workers take turns."""
        within_reach = self.usable_tokens + self.host_tokens
        return (self.known, within_reach, self.usable_tokens, -self.num_unfinished, -self.num_requests)


async def pick_worker(client: StemcacheClient, prompt: str, salt: str) -> str:
    """Returns an address of the client's; the first one when none replies, whose error will say what is wrong.

    Without a cache service to ask, load alone decides.
    """
    if len(client.workers) == 1:
        return client.workers[0]
    described = await asyncio.gather(*(_describe(client, worker) for worker in client.workers))
    workers = {one.worker_id: (address, one) for address, one in described if one is not None and not one.draining}
    if not workers:
        return client.workers[0]
    first = next(iter(workers.values()))[0]
    found = await _ask_the_cache(client, first, prompt, salt)
    choices = [
        found.get(worker_id, Choice(address))._replace(
            address=address, num_unfinished=one.num_running + one.num_waiting
        )
        for worker_id, (address, one) in workers.items()
    ]
    return max(choices, key=lambda choice: choice.rank).address


async def generate_where_cached(
    worker: str,
    prompt: str,
    sampling: worker_pb2.SamplingParams,
    salt: str,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> Answer:
    """Asks the worker of the option `worker`, or the best one of all."""
    async with StemcacheClient(cache_of_workers(worker), find_workers(worker)) as client:
        picked = await pick_worker(client, prompt, salt)
        return await client.generate(picked, prompt, sampling, salt=salt, on_answer=on_answer)


async def _describe(client: StemcacheClient, worker: str) -> tuple[str, worker_pb2.DescribeResponse | None]:
    try:
        return worker, await client.describe(worker)
    except grpc.RpcError:
        return worker, None


async def _ask_the_cache(client: StemcacheClient, worker: str, prompt: str, salt: str) -> dict[str, Choice]:
    """Returns matches by worker id; none when the cache service is away: workers serve without it."""
    if not client.cache:
        return {}
    try:
        tokenized = await client.tokenize(worker, prompt, salt)
        matched, stats = await asyncio.gather(client.match(tokenized.namespace, tokenized.token_ids), client.stats())
    except grpc.RpcError:
        return {}
    requests = {one.worker_id: one.num_requests for one in stats.workers}
    return {one.worker_id: _choice(one, requests.get(one.worker_id, 0)) for one in matched.workers}


def _choice(one: cache_pb2.WorkerMatch, num_requests: int) -> Choice:
    host_tokens = 0 if one.match.miss_reason in NOT_FETCHED else one.match.host_tokens
    return Choice("", True, one.match.usable_tokens, host_tokens, num_requests=num_requests)
