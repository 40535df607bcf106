"""Requests that run while something is done to the processes around them, and what must hold afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from protos.v1 import cache_pb2
from tests.e2e.client import Answer, Client, nothing_is_held

Draw = Callable[[int], list[int]]


class Running:
    """Requests of several lengths that decode for a while; `decoding` is set once each has got some tokens."""

    def __init__(self, client: Client, worker: str, prompts: list[list[int]], max_tokens: int = 200) -> None:
        self._counts = [0] * len(prompts)
        self.decoding = asyncio.Event()
        self.prompts = prompts
        self.max_tokens = max_tokens
        self._client = client
        self._worker = worker
        self.tasks = [asyncio.create_task(self._run(at)) for at in range(len(prompts))]

    def _run(self, at: int) -> Coroutine[Any, Any, Answer]:
        def on_token(count: int) -> None:
            self._counts[at] = count
            if min(self._counts) >= 3:
                self.decoding.set()

        return self._client.generate(self._worker, self.prompts[at], self.max_tokens, on_token=on_token)

    def _cold(self, worker: str, prompt: list[int]) -> Coroutine[Any, Any, Answer]:
        return self._client.cold(worker or self._worker, prompt, self.max_tokens)

    @property
    def all_run(self) -> bool:
        return not any(task.done() for task in self.tasks)

    async def check(self, worker: str = "") -> None:
        """All finish, as each would have undisturbed: one of them alone, the others together, which is much faster."""
        answers = await asyncio.gather(*self.tasks)
        first, *others = self.prompts
        colds = [await self._cold(worker, first)]
        colds += await asyncio.gather(*(self._cold(worker, prompt) for prompt in others))
        for prompt, answer, cold in zip(self.prompts, answers, colds, strict=True):
            assert answer.tokens == cold.tokens
            assert len(answer.tokens) == self.max_tokens
            # Nobody had to begin anew: every prompt token was computed or found once.
            assert sum(answer.counts) == len(prompt)
            assert answer.usage.num_preemptions == 0


def lengths(draw: Draw) -> list[list[int]]:
    shared = draw(64)
    return [draw(20), shared + draw(100), shared + draw(7), draw(300)]


def healthy(stats: cache_pb2.StatsResponse) -> bool:
    """Nothing is held, and every page is free or evictable."""
    groups = [group for worker in stats.workers for group in worker.groups]
    return nothing_is_held(stats) and all(g.num_free + g.num_evictable == g.num_pages for g in groups)
