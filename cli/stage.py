"""The services that the demo's scenes use, and the result of a scene."""

from __future__ import annotations

import asyncio
import secrets
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from cli.client import Answer, StemcacheClient, sentence
from cli.comparison import NUM_RATED, Likeness, compare
from cli.supervisor import Supervisor
from protos.v1 import worker_pb2
from register_qa import Question, Register, Split, draw_register, is_correct

# About 1,500 tokens of the model in the box.
HOLDINGS = 54
MAX_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Shown:
    """One question with its answer, as people read it, and how many prompt tokens the cache saved."""

    question: str
    answer: str
    right: bool
    saved: int
    prompt: int


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
    shown: list[Shown] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def count(self, answers: Sequence[Answer]) -> None:
        self.requests += len(answers)
        for answer in answers:
            self.prompt += answer.usage.prompt_tokens
            self.cached += answer.usage.cached_tokens
            self.fetched += answer.usage.fetched_tokens
            self.computed += answer.usage.computed_tokens

    def show(self, question: Question, answer: Answer) -> None:
        """Shows the question without its frame, and the answer's first sentence."""
        usage = answer.usage
        text = first_sentence(answer.text)
        saved = usage.cached_tokens + usage.fetched_tokens
        self.shown.append(Shown(wording(question), text, is_correct(question, text), saved, usage.prompt_tokens))

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append(otherwise)

    def compare(self, warm: Sequence[Answer], cold: Sequence[Answer], *, ties: bool = False) -> None:
        """Compares answers with cold ones, token by token, with `ties` but for near ties; notes times and failures."""
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
    """Two workers, their supervisor, and whether they share a host tier.

    A model with recurrent states leaves snapshots each `snapshot_tokens` tokens; others have `page_tokens` there.
    """

    client: StemcacheClient
    supervisor: Supervisor
    worker_names: tuple[str, str]
    page_tokens: int
    snapshot_tokens: int
    shared_tier: bool
    seed: int
    dtype: str

    @property
    def reads_decoded_otherwise(self) -> bool:
        """Returns whether what decode wrote differs, by rounding, from what a cold run's prefill writes; see
        comparison.py."""
        return self.dtype != "float32"

    @property
    def first(self) -> str:
        return self.client.workers[0]

    @property
    def second(self) -> str:
        return self.client.workers[1]

    def register(self, number: int) -> Register:
        """Returns a register that the model in the box was not trained on; each scene has numbers of its own."""
        return draw_register(self.seed * 1000 + number, split=Split.EVAL, holdings=HOLDINGS)

    async def token_ids(self, text: str) -> list[int]:
        return array("i", (await self.client.tokenize(self.first, text)).token_ids).tolist()

    async def further_ids(self, text: str) -> list[int]:
        """Returns the ids of a text that continues another one: without what the tokenizer puts before a prompt."""
        return (await self.token_ids(text))[len(await self.token_ids("")) :]

    async def cold(self, worker: str, prompt: Sequence[int], sampling: worker_pb2.SamplingParams) -> Answer:
        """Generates under a new salt, so nothing is reused."""
        rated = worker_pb2.SamplingParams()
        rated.CopyFrom(sampling)
        rated.logprobs = NUM_RATED
        return await self.client.generate(worker, prompt, rated, salt=f"cold-{secrets.token_hex(8)}")

    async def ask(self, worker: str, prompt: Sequence[int]) -> Answer:
        return await self.client.generate(worker, prompt, sentence(MAX_ANSWER_TOKENS))

    async def all_cold(self, worker: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Returns cold answers to all of these at once."""
        return await asyncio.gather(*(self.cold(worker, prompt, sentence(MAX_ANSWER_TOKENS)) for prompt in prompts))

    def whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_tokens * self.page_tokens

    def left_by_one(self, num_tokens: int) -> int:
        """Returns what the first other request reuses of a prefix that one request left, in whose middle it ends."""
        return num_tokens // self.snapshot_tokens * self.snapshot_tokens


def wording(question: Question) -> str:
    """Returns the question without the words that frame it in the prompt."""
    return question.text.strip().removeprefix("Question:").removesuffix("Answer:").strip()


def first_sentence(text: str) -> str:
    """Returns the text up to the first full stop: what a model that may not stop writes behind it means nothing."""
    head, stop, _ = text.strip().partition(".")
    return head + stop


def spoken_tokens(answer: Answer) -> list[int]:
    """Returns the generated tokens without the one that ended them."""
    ended = answer.finish_reason == worker_pb2.FINISH_REASON_STOP
    return answer.token_ids[:-1] if ended else answer.token_ids
