"""A few turns about one register, joined into prompts that each extend the one before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from register_qa import Question, Register


class Turn(NamedTuple):
    """A question and the text that was generated behind it, right or wrong."""

    question: Question
    text: str


def prompt_of(register: Register, question: Question, earlier: Iterable[Turn] = ()) -> str:
    """Register, earlier turns and the question; the first turns of a longer conversation are its prefix."""
    return register.text + "".join(map(written_turn, earlier)) + question.text


def written_turn(turn: Turn) -> str:
    """A turn as later turns see it: one space before the answer, none behind."""
    return f"{turn.question.text} {turn.text.strip()}"
