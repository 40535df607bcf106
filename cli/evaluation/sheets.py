"""What an evaluation asks: held-out registers of a wanted length, and questions about each, as tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cli.client import StemcacheClient
from register_qa import MAX_HOLDINGS, MIN_HOLDINGS, Kind, Question, Register, Split, draw_questions, draw_register

# Registers of one evaluation have seeds of their own: seed * this + number.
SEEDS_APART = 1_000_000
# How many holdings the register has by which their size in tokens is measured.
NUM_PROBED = 40


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the whole prompt that asks it: register and question."""

    question: Question
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A register as the prefix that its questions share. `prefix` is really one: each prompt starts with it."""

    register: Register
    prefix: tuple[int, ...]
    asked: tuple[Asked, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(one.prompt) for one in self.asked)


@dataclass(frozen=True, slots=True)
class SheetPlan:
    """Numbers of questions, registers, and tokens per register (about)."""

    questions: int
    registers: int
    tokens: int
    kinds: tuple[Kind, ...]
    seed: int

    def shares(self) -> list[int]:
        """Questions of each register: as equal as they can be."""
        each, more = divmod(self.questions, self.registers)
        return [each + (number < more) for number in range(self.registers)]


async def draw_sheets(client: StemcacheClient, worker: str, plan: SheetPlan) -> list[Sheet]:
    """The same plan and tokenizer give the same sheets. ValueError: too short for its questions."""
    holdings = await _holdings_for(client, worker, plan)
    sheets: list[Sheet] = []
    turn = 0
    for number, count in enumerate(plan.shares()):
        register = draw_register(plan.seed * SEEDS_APART + number, split=Split.EVAL, holdings=holdings)
        # The kinds take turns over all registers, or those at the end would be asked less.
        kinds = plan.kinds[turn % len(plan.kinds) :] + plan.kinds[: turn % len(plan.kinds)]
        questions = draw_questions(register, plan.seed, count, kinds)
        sheets.append(await _sheet(client, worker, register, questions))
        turn += count
    return sheets


async def tokens_of(client: StemcacheClient, worker: str, text: str) -> tuple[int, ...]:
    """The text's token ids."""
    return tuple(array("i", (await client.tokenize(worker, text)).token_ids))


async def _holdings_for(client: StemcacheClient, worker: str, plan: SheetPlan) -> int:
    probe = draw_register(plan.seed * SEEDS_APART, split=Split.EVAL, holdings=NUM_PROBED)
    size = len(await tokens_of(client, worker, probe.text))
    return max(MIN_HOLDINGS, min(MAX_HOLDINGS, round(plan.tokens * NUM_PROBED / size)))


async def _sheet(client: StemcacheClient, worker: str, register: Register, questions: Sequence[Question]) -> Sheet:
    prefix = await tokens_of(client, worker, register.text)
    asked = []
    for question in questions:
        prompt = await tokens_of(client, worker, register.text + question.text)
        if prompt[: len(prefix)] != prefix:
            raise ValueError("tokenizer: a register's tokens depend on the question behind it")
        asked.append(Asked(question, prompt))
    return Sheet(register, prefix, tuple(asked))
