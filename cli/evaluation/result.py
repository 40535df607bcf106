"""The result of one way of obtaining a prefix: marks, token counts, times, and failed expectations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cli.client import Answer
from cli.evaluation.sheets import Asked, Sheet
from register_qa import Kind, is_correct

# Of a register's tokens, in each request that is to reuse them.
LEAST_HIT_SHARE = 0.9


class Reply(NamedTuple):
    """An answer to one of a sheet's questions. `reuses` is False for a request that had to compute its prefix.

    `sent_s` is the client's clock when the request went out.
    """

    sheet: Sheet
    asked: Asked
    answer: Answer
    reuses: bool
    sent_s: float

    @property
    def hit_tokens(self) -> int:
        """Tokens of the register that were not computed."""
        usage = self.answer.usage
        return min(usage.cached_tokens + usage.fetched_tokens, len(self.sheet.prefix))

    @property
    def is_hit(self) -> bool:
        return self.hit_tokens >= LEAST_HIT_SHARE * len(self.sheet.prefix)

    @property
    def is_right(self) -> bool:
        return is_correct(self.asked.question, self.answer.text)


@dataclass(slots=True)
class Marks:
    """Exact matches among the questions of some kinds."""

    asked: int = 0
    right: int = 0

    @property
    def accuracy(self) -> float | None:
        """None when nothing was asked."""
        return self.right / self.asked if self.asked else None


@dataclass(slots=True)
class WayResult:
    """Sums over a way's questions; `hit_share` and `warm` over those that were to reuse the register.

    `proof` says what shows that it came about as the title says. `failures` is empty when all held.
    """

    way: str
    title: str
    questions: int = 0
    one_fact: Marks = field(default_factory=Marks)
    two_facts: Marks = field(default_factory=Marks)
    prompt: int = 0
    cached: int = 0
    fetched: int = 0
    computed: int = 0
    warm: int = 0
    hit_share: float = 0.0
    first_token_s: float = 0.0
    same_text: int = 0
    proof: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append(otherwise)

    def count(self, replies: Sequence[Reply], cold: Mapping[Asked, Answer]) -> None:
        """Takes the way's replies in; `cold` has each question's answer from a run that reused nothing."""
        self.questions = len(replies)
        for reply in replies:
            self._count_one(reply)
            self.same_text += reply.answer.token_ids == cold[reply.asked].token_ids
        self.first_token_s = statistics.median(reply.answer.first_token_s for reply in replies)
        warm = [reply for reply in replies if reply.reuses]
        self.warm = len(warm)
        if warm:
            self.hit_share = sum(reply.hit_tokens for reply in warm) / sum(len(reply.sheet.prefix) for reply in warm)
        self.expect(
            self.same_text == len(replies), f"{len(replies) - self.same_text} answers differ from their cold run"
        )

    def _count_one(self, reply: Reply) -> None:
        usage = reply.answer.usage
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.fetched += usage.fetched_tokens
        self.computed += usage.computed_tokens
        marks = self.two_facts if reply.asked.question.kind is Kind.TWO_FACTS else self.one_fact
        marks.asked += 1
        marks.right += reply.is_right

    def expect_hits(self, replies: Sequence[Reply]) -> None:
        """Every request that was to reuse its register did, and there were such requests."""
        missed = [reply for reply in replies if reply.reuses and not reply.is_hit]
        self.expect(any(reply.reuses for reply in replies), "no request was to reuse anything")
        self.expect(
            not missed,
            f"{len(missed)} requests reused less than {LEAST_HIT_SHARE:.0%} of their register, "
            f"the first one {missed[0].hit_tokens} of {len(missed[0].sheet.prefix)} tokens"
            if missed
            else "",
        )
