"""The demo's scenes: each shows one way a prefix is reused, compares with a cold run, and says what it expected.

Knows the protocol and the supervisor; not how results are shown. A cold run is the same prompt under a salt that
nobody used.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cli.client import Answer, StemcacheClient, greedy, wait_serving
from cli.comparison import NUM_RATED, Likeness, compare
from cli.supervisor import Supervisor
from cli.traffic import conversations, interleaved, system_prompt

SPILL_WAIT_S = 30.0
RESTART_WAIT_S = 60.0


@dataclass(slots=True)
class SceneResult:
    """Token sums over the scene's requests; times are medians in seconds. `failures` is empty when all held."""

    title: str
    number: int = 0
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    fetched: int = 0
    computed: int = 0
    cold_s: float = 0.0
    warm_s: float = 0.0
    same_answer: bool = True
    ties: int = 0
    skipped: str = ""
    note: str = ""
    failures: list[str] = field(default_factory=list)

    def count(self, answers: Sequence[Answer]) -> None:
        self.requests += len(answers)
        for answer in answers:
            self.prompt += answer.usage.prompt_tokens
            self.cached += answer.usage.cached_tokens
            self.fetched += answer.usage.fetched_tokens
            self.computed += answer.usage.computed_tokens

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append(otherwise)

    def compare(self, warm: Sequence[Answer], cold: Sequence[Answer], *, ties: bool = False) -> None:
        """Token for token, or `ties` apart; and the cold runs must really have been cold."""
        found = [compare(a, b) for a, b in zip(warm, cold, strict=True)]
        self.ties += found.count(Likeness.TIE) if ties else 0
        wrong = (Likeness.OTHER,) if ties else (Likeness.OTHER, Likeness.TIE)
        self.same_answer = self.same_answer and not any(one in wrong for one in found)
        self.expect(self.same_answer, "an answer differs from its cold run")
        self.expect(all(a.usage.cached_tokens + a.usage.fetched_tokens == 0 for a in cold), "a cold run hit the cache")
        self.cold_s = statistics.median(a.first_token_s for a in cold)
        self.warm_s = statistics.median(a.first_token_s for a in warm)


@dataclass(frozen=True, slots=True)
class Stage:
    """What the scenes play on: two workers, their supervisor, and whether they share a host tier."""

    client: StemcacheClient
    supervisor: Supervisor
    worker_names: tuple[str, str]
    page_tokens: int
    shared_tier: bool
    seed: int
    dtype: str

    @property
    def reads_decoded_otherwise(self) -> bool:
        """Whether what decode wrote differs, by rounding, from what a cold run's prefill writes; see comparison.py."""
        return self.dtype != "float32"

    @property
    def first(self) -> str:
        return self.client.workers[0]

    @property
    def second(self) -> str:
        return self.client.workers[1]

    async def token_ids(self, text: str, num_tokens: int = 0) -> list[int]:
        """The text's tokens, cut to `num_tokens` when that is given."""
        response = await self.client.tokenize(self.first, text)
        ids = memoryview(response.token_ids).cast("i").tolist()
        if num_tokens and len(ids) < num_tokens:
            raise ValueError(f"num_tokens: the text has {len(ids)} tokens only")
        return ids[:num_tokens] if num_tokens else ids

    async def cold(self, worker: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        return await self.client.generate(
            worker, prompt, greedy(max_tokens, NUM_RATED), salt=f"cold-{secrets.token_hex(8)}"
        )

    def whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_tokens * self.page_tokens


async def shared_system_prompt(stage: Stage) -> SceneResult:
    """Eight requests at once over one long system prompt: one prefill for all."""
    result = SceneResult("eight at once, one system prompt")
    system = system_prompt(stage.seed, 24)
    prompts = [await stage.token_ids(f"{system}User {i}: where is tool {i * 7}?\n") for i in range(8)]
    cold = await asyncio.gather(*(stage.cold(stage.first, prompt, 12) for prompt in prompts))
    warm = await asyncio.gather(*(stage.client.generate(stage.first, prompt, greedy(12)) for prompt in prompts))
    result.count(warm)
    result.compare(warm, cold)
    shared = stage.whole_pages(_common_length(prompts))
    reused = sum(a.usage.cached_tokens for a in warm)
    result.expect(reused >= 7 * shared, f"expected 7 x {shared} tokens to be reused, got {reused}")
    result.note = f"the prefix of {shared:,} tokens was computed once"
    return result


async def mid_flight_sibling(stage: Stage) -> SceneResult:
    """A sibling arrives while the first request still decodes, and reuses what that one has published so far."""
    result = SceneResult("sibling of a request that still decodes")
    prompt = await stage.token_ids(system_prompt(stage.seed + 1, 12), 338)
    cold = await stage.cold(stage.first, prompt, 8)
    decoding, finished = asyncio.Event(), asyncio.Event()

    async def elder() -> Answer:
        answer = await stage.client.generate(stage.first, prompt, greedy(160), on_answer=lambda _: decoding.set())
        finished.set()
        return answer

    task = asyncio.create_task(elder())
    waiting = asyncio.create_task(decoding.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    sibling = await stage.client.generate(stage.first, prompt, greedy(8))
    result.expect(not finished.is_set(), "the first request had finished already, so nothing was mid-flight")
    first = await task
    result.count([sibling])
    result.compare([sibling], [cold])
    result.expect(first.token_ids[:8] == cold.token_ids, "the first request's answer differs from its cold run")
    usable = stage.whole_pages(len(prompt) - 1)
    got = sibling.usage.cached_tokens, sibling.usage.computed_tokens
    result.expect(
        got == (usable, len(prompt) - usable),
        f"expected {usable} cached and {len(prompt) - usable} computed, got {got}",
    )
    return result


async def multi_turn(stage: Stage) -> SceneResult:
    """The second turn sends the first turn's token ids back: its generated tokens hit too."""
    result = SceneResult("second turn of a conversation")
    first_prompt = await stage.token_ids(system_prompt(stage.seed + 2, 10) + "Which tool comes first?\n")
    first = await stage.client.generate(stage.first, first_prompt, greedy(40))
    history = first_prompt + first.token_ids
    second_prompt = history + await stage.token_ids("\nAnd after that one?\n")
    cold = await stage.cold(stage.first, second_prompt, 12)
    second = await stage.client.generate(stage.first, second_prompt, greedy(12))
    result.count([second])
    result.compare([second], [cold], ties=stage.reads_decoded_otherwise)
    # The last sampled token was never fed back, so it has no KV.
    expected = stage.whole_pages(len(history) - 1)
    result.expect(
        second.usage.cached_tokens == expected, f"expected {expected} cached, got {second.usage.cached_tokens}"
    )
    generated = expected - stage.whole_pages(len(first_prompt))
    result.note = f"{generated} of the reused tokens were generated"
    return result


async def other_worker(stage: Stage) -> SceneResult:
    """A prefix that one worker used twice comes to the other one through the host tier."""
    result = SceneResult("the same prefix on the other worker")
    if not stage.shared_tier:
        result.skipped = "no shared host tier"
        return result
    prompt = await stage.token_ids(system_prompt(stage.seed + 3, 30))
    cold = await stage.cold(stage.second, prompt, 12)
    for _ in range(2):
        await stage.client.generate(stage.first, prompt, greedy(12))
    usable = stage.whole_pages(len(prompt) - 1)
    spilled = await _wait_for_host_tokens(stage, prompt, usable)
    result.expect(spilled >= usable, f"expected {usable} tokens in the host tier, found {spilled}")
    fetched = await stage.client.generate(stage.second, prompt, greedy(12))
    result.count([fetched])
    result.compare([fetched], [cold])
    result.expect(
        fetched.usage.fetched_tokens == usable, f"expected {usable} fetched, got {fetched.usage.fetched_tokens}"
    )
    return result


async def killed_worker(stage: Stage) -> SceneResult:
    """kill -9 in the middle of a request: the retry elsewhere gives the same answer, and the worker comes back."""
    result = SceneResult("worker killed mid-request, retried")
    prompt = await stage.token_ids(system_prompt(stage.seed + 4, 16))
    cold = await stage.cold(stage.second, prompt, 96)
    victim = stage.supervisor.children[stage.worker_names[0]]
    killed = False

    def kill_once(answer: Answer) -> None:
        nonlocal killed
        if not killed and answer.worker == stage.first and len(answer.token_ids) >= 4:
            killed = True
            victim.kill()

    answer = await stage.client.generate_with_retry(
        (stage.first, stage.second), prompt, greedy(96), on_answer=kill_once
    )
    result.count([answer])
    result.compare([answer], [cold])
    result.expect(killed and answer.retries == 1, f"expected one retry after the kill, saw {answer.retries}")
    await asyncio.wait_for(wait_serving(stage.first), RESTART_WAIT_S)
    again = await stage.client.generate(stage.first, prompt, greedy(96))
    result.expect(again.token_ids == cold.token_ids, "the worker that came back answers differently")
    result.note = f"{stage.worker_names[0]} is back after {victim.restarts} restart"
    return result


async def traffic(stage: Stage) -> SceneResult:
    """Conversations over both workers; every fourth turn is checked against a cold run."""
    result = SceneResult("conversations over both workers")
    made = conversations(stage.seed, 12, num_systems=2, num_rules=12)
    histories = [await stage.token_ids(conversation.system) for conversation in made]
    warm: list[Answer] = []
    checked: list[tuple[Answer, Answer]] = []
    for number, turn in enumerate(interleaved(stage.seed, made, num_active=4)):
        worker = stage.client.workers[turn.conversation % 2]
        prompt = histories[turn.conversation] + await stage.token_ids(f"User: {turn.text}\n")
        answer = await stage.client.generate(worker, prompt, greedy(16))
        warm.append(answer)
        histories[turn.conversation] = prompt + answer.token_ids
        if number % 4 == 3:
            checked.append((answer, await stage.cold(worker, prompt, 16)))
    result.count(warm)
    result.compare([a for a, _ in checked], [b for _, b in checked], ties=stage.reads_decoded_otherwise)
    saved = result.cached + result.fetched
    result.note = f"hit rate {saved / result.prompt:.0%}, {saved:,} of {result.prompt:,} prompt tokens saved"
    result.expect(
        saved > result.prompt // 2,
        f"expected more than half of the prompt tokens saved, got {saved} of {result.prompt}",
    )
    return result


Scene = Callable[[Stage], Awaitable[SceneResult]]

# Counted from 1. Each stands alone: its prompts are its own, so any of them may be played without the others.
SCENES: tuple[Scene, ...] = (
    shared_system_prompt,
    mid_flight_sibling,
    multi_turn,
    other_worker,
    killed_worker,
    traffic,
)


def _common_length(prompts: Sequence[Sequence[int]]) -> int:
    return next(
        (i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1), min(map(len, prompts))
    )


async def _wait_for_host_tokens(stage: Stage, prompt: Sequence[int], wanted: int) -> int:
    """How many of the prompt's tokens the second worker could have, once the background spills are through."""
    namespace = (await stage.client.describe(stage.second)).namespace
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt)
    found = 0
    for _ in range(int(SPILL_WAIT_S / 0.1)):
        response = await stage.client.match(namespace, tokens)
        found = max(
            (w.match.usable_tokens + w.match.host_tokens for w in response.workers if w.endpoint == stage.second),
            default=0,
        )
        if found >= wanted:
            break
        await asyncio.sleep(0.1)
    return found
