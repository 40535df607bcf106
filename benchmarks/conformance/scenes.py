"""The scenes that an engine with the host tier under it has to stand; the tokens of a cold run are the measure."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from benchmarks.conformance.engine import Answer, Engine
from benchmarks.conformance.services import Counted, Services

PROMPT_CHARS = 397
ANSWER_TOKENS = 16
SETTLE_S = 60.0
MOST_ATTEMPTS = 60
PAUSE_S = 0.5
# An engine may begin to save a moment after its answer.
QUIET_S = 0.5
# Of the prompt at once, when it is looked whether tokens tell.
TELLING_TOKENS = 32
CROWD = 4
LONG_ANSWER_TOKENS = 96
# An engine counts none of those that it does not have.
PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
TENANT, OTHER_TENANT = "tenant-one", "tenant-two"


class Row(NamedTuple):
    """`expected` and `from_tier` are prompt tokens, the latter by the engine's metric; None: not counted."""

    scene: str
    same_tokens: bool
    expected: int | None
    from_tier: int
    counted: Counted
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.same_tokens and self.expected in (None, self.from_tier)


class Run:
    """`make_engine` starts nothing; the services run.

    `tail`: what requests that are to hit have behind the prompt, for an engine that resumes only where an earlier
    request has ended. A tenant's first request is the prompt alone.
    """

    def __init__(self, services: Services, make_engine: Callable[[], Engine], page_tokens: int, tail: str = "") -> None:
        self._services, self._make_engine, self._page_tokens = services, make_engine, page_tokens
        self._engine, self._tail = make_engine(), tail
        self._cold: dict[str, tuple[int, ...]] = {}

    def rows(self) -> Iterator[Row]:
        """Each scene as it ends. Later ones need what earlier ones stored."""
        try:
            self._engine.start()
            yield from self._first_process()
            self._engine.kill()
            self._engine = self._make_engine()
            self._engine.start()
            yield from self._second_process()
        finally:
            self._engine.kill()

    def _first_process(self) -> Iterator[Row]:
        self._check_that_tokens_tell()
        if self._tail:
            self._is_same(prompt() + self._tail, self._engine.ask(prompt() + self._tail, "control", ANSWER_TOKENS))
        yield self._scene("cold", expected=0, forget=False, first=True)
        self._settle()
        yield self._scene("warm, the engine's own cache", expected=0, forget=False)
        yield self._scene("warm, from the tier")

    def _check_that_tokens_tell(self) -> None:
        """A model whose tokens do not depend on each page of its prompt would pass with wrong pages."""
        whole, size = prompt(), max(self._page_tokens, TELLING_TOKENS)
        of_itself = self._engine.ask(whole, "control", ANSWER_TOKENS).tokens
        for first in range(0, (len(whole) - 1) // size * size, size):
            other = f"{whole[:first]}{'#' * size}{whole[first + size :]}"
            if self._engine.ask(other, "control", ANSWER_TOKENS).tokens == of_itself:
                raise SystemExit(f"the model's tokens do not depend on the page at {first}: take another model")
        self._settle()

    def _second_process(self) -> Iterator[Row]:
        yield self._scene("another process", forget=False)
        yield self._scene("another tenant, its first time", salt=OTHER_TENANT, expected=0, first=True)
        self._settle()
        yield self._scene("another tenant, from the tier", salt=OTHER_TENANT)
        yield self._scene("the first tenant again")
        yield from self._crowd()
        yield from self._damaged("a page is missing", self._services.drop, lambda counted: counted.missing_pages)
        yield from self._damaged("a page is torn", self._services.damage, lambda counted: counted.corrupt_pages)
        yield from self._away("Redis", self._services.redis.kill, self._services.redis.start)
        yield from self._away("the cache service", self._services.cache.kill, self._services.cache.start)

    def _crowd(self) -> Iterator[Row]:
        """Sends long requests at once. An engine without pages for all of them preempts some and resumes them."""
        alone: dict[str, tuple[int, ...]] = {}  # with nothing to reuse
        for scene, tail in (("four at once", ""), ("four at once, from the tier", self._tail)):
            prompts = [prompt(number) + tail for number in range(1, CROWD + 1)]
            for each in prompts:
                if each not in alone:
                    alone[each] = self._engine.ask(each, f"alone{tail}", LONG_ANSWER_TOKENS).tokens
            self._settle()
            self._engine.forget()
            before, tokens_before = self._services.counted(), self._engine.counter(self._engine.metric)
            preempted = self._num_preempted()
            with ThreadPoolExecutor(CROWD) as pool:
                answers = list(pool.map(lambda each: self._engine.ask(each, TENANT, LONG_ANSWER_TOKENS), prompts))
            self._settle()
            same = [answer.tokens for answer in answers] == [alone[each] for each in prompts]
            from_tier = self._engine.counter(self._engine.metric) - tokens_before
            note = f"{self._num_preempted() - preempted} preemptions"
            yield Row(scene, same, None, from_tier, self._services.counted().since(before), note)

    def _damaged(self, scene: str, damage: Callable[[bytes], bytes], count: Callable[[Counted], int]) -> Iterator[Row]:
        """One page at a time, until the engine met one: it does not read those that a window has left."""
        for key in sorted(self._services.page_keys()):
            value = damage(key)
            row = self._scene(scene, expected=None)
            if count(row.counted):
                self._settle()
                yield row._replace(note="counted by HostTier, computed again")
                self._leave_end()
                yield self._scene(f"{scene}: written again")
                return
            self._services.put(key, value)
            if not row.same_tokens:
                yield row
        raise RuntimeError(f"{scene}: the engine met none of the pages")

    def _away(self, what: str, kill: Callable[[], None], start: Callable[[], None]) -> Iterator[Row]:
        kill()
        yield self._scene(f"{what} is dead", expected=None, alive=False)
        yield self._until_passed(f"{what} is dead, and known to be", expected=0, alive=False)
        start()
        yield self._until_passed(f"{what} is back", expected=-1, alive=True)

    def _until_passed(self, scene: str, expected: int, alive: bool) -> Row:
        """Tokens have to be the same each time; what is hit may take a while."""
        for attempt in itertools.count(1):
            if alive:
                self._leave_end()
            row = self._scene(scene, expected=expected, alive=alive)
            if row.passed or not row.same_tokens or attempt == MOST_ATTEMPTS:
                break
            time.sleep(PAUSE_S)
        return row._replace(note=f"at request {attempt}")

    def _leave_end(self) -> None:
        """An engine that resumes only where a request has ended needs one that ends there."""
        if self._tail:
            self._engine.forget()
            self._engine.ask(prompt(), TENANT, ANSWER_TOKENS)
            self._settle()

    def _scene(
        self,
        scene: str,
        salt: str = TENANT,
        expected: int | None = -1,
        forget: bool = True,
        alive: bool = True,
        first: bool = False,
    ) -> Row:
        """`expected` -1: all whole pages before the last token, or before the tail. `first`: the tenant's request."""
        if forget:
            self._engine.forget()
        before = self._services.counted() if alive else Counted()
        tokens_before = self._engine.counter(self._engine.metric)
        asked = prompt() + ("" if first else self._tail)
        answer = self._engine.ask(asked, salt, ANSWER_TOKENS)
        from_tier = self._engine.counter(self._engine.metric) - tokens_before
        if alive:
            self._settle()
        counted = self._services.counted().since(before) if alive else Counted()
        if expected == -1:
            behind = max(1, len(self._tail))
            expected = (answer.prompt_tokens - behind) // self._page_tokens * self._page_tokens
        return Row(scene, self._is_same(asked, answer), expected, from_tier, counted)

    def _is_same(self, asked: str, answer: Answer) -> bool:
        """As the first run of this prompt, which had nothing to reuse."""
        return self._cold.setdefault(asked, answer.tokens) == answer.tokens

    def _num_preempted(self) -> int:
        return sum(self._engine.counter(name) for name in PREEMPTIONS)

    def _settle(self) -> None:
        """Waits until what was computed is written, and nothing more is begun."""
        until = time.monotonic() + SETTLE_S
        quiet_until = time.monotonic() + QUIET_S
        while (now := time.monotonic()) < min(quiet_until, until):
            if not self._services.is_settled():
                quiet_until = now + QUIET_S
            time.sleep(0.05)


def prompt(number: int = 0) -> str:
    """One token for each character where the tokenizer is of bytes."""
    return "".join(chr(97 + (place * 7 + place // 26 + number) % 26) for place in range(PROMPT_CHARS))
