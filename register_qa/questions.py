"""Draw questions about a register, each with its answer and with the places of its facts in the register.

An answer is right by what the register says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from register_qa.facts import Attribute, Fact
from register_qa.register import Holding, Place, Register


class Kind(StrEnum):
    """What is asked. TWO_FACTS needs a holding's room and the hook of that room's key; the others need one fact."""

    ROOM = "room"
    SHELF = "shelf"
    YEAR = "year"
    CONDITION = "condition"
    HOOK = "hook"
    TWO_FACTS = "two_facts"


ONE_FACT_KINDS = tuple(kind for kind in Kind if kind is not Kind.TWO_FACTS)

WORDINGS = {
    Kind.ROOM: ("Where is the {name} kept?", "In which room is the {name}?"),
    Kind.SHELF: ("On which shelf is the {name}?", "Which shelf holds the {name}?"),
    Kind.YEAR: ("When was the {name} made?", "From which year is the {name}?"),
    Kind.CONDITION: ("In what condition is the {name}?", "How well is the {name} preserved?"),
    Kind.HOOK: ("Where does the key to the {name} hang?", "Which hook holds the key to the {name}?"),
    Kind.TWO_FACTS: (
        "Which hook holds the key to the room of the {name}?",
        "Where does the key to the room with the {name} hang?",
    ),
}
ANSWERS = {
    Kind.ROOM: "The {name} is kept in the {room}.",
    Kind.SHELF: "The {name} is on shelf {shelf}.",
    Kind.YEAR: "The {name} was made in {year}.",
    Kind.CONDITION: "The {name} is {condition}.",
    Kind.HOOK: "The key to the {name} hangs on hook {hook}.",
    Kind.TWO_FACTS: "The {name} is kept in the {room}, whose key hangs on hook {hook}.",
}


@dataclass(frozen=True, slots=True)
class AskedFact:
    fact: Fact
    place: Place


@dataclass(frozen=True, slots=True)
class Question:
    """`text` is appended to the register's text as it is; `answer` is the sentence expected, without space around it.

    `facts` are what the answer needs, in the order in which the answer names them; `holdings` what is asked about (none
    for a room's key).
    """

    kind: Kind
    text: str
    answer: str
    facts: tuple[AskedFact, ...]
    holdings: tuple[Holding, ...]


def is_correct(question: Question, text: str) -> bool:
    """Returns whether the text is the answer, word for word: without special tokens, and white space around it."""
    return text.strip() == question.answer


def draw_questions(
    register: Register, seed: int, count: int, kinds: Sequence[Kind] = tuple(Kind)
) -> tuple[Question, ...]:
    """`count` questions, no two about the same thing in the same kind; the kinds take turns.

    ValueError names `count` or `kinds` when the register has too few of them.
    """
    if not kinds:
        raise ValueError("kinds: at least one is needed")
    if count < 1:
        raise ValueError(f"count: must be at least 1, not {count}")
    rng = random.Random(f"questions {register.split.value} {register.seed} {seed}")
    distinct = tuple(dict.fromkeys(kinds))
    asked = {kind: _drawn_of_kind(register, rng, kind, -(-count // len(distinct))) for kind in distinct}
    return tuple(asked[distinct[turn % len(distinct)]].pop() for turn in range(count))


def _drawn_of_kind(register: Register, rng: random.Random, kind: Kind, count: int) -> list[Question]:
    available = len(register.room_keys) if kind is Kind.HOOK else len(register.holdings)
    if count > available:
        raise ValueError(f"count: the register has {available} questions of kind {kind.value}, not {count}")
    if kind is Kind.HOOK:
        return [_about_key(register, rng, key.room) for key in rng.sample(register.room_keys, count)]
    return [_about_holding(register, rng, kind, holding) for holding in rng.sample(register.holdings, count)]


def _about_holding(register: Register, rng: random.Random, kind: Kind, holding: Holding) -> Question:
    facts: tuple[Fact, ...]
    if kind is Kind.TWO_FACTS:
        facts = (holding.fact(Attribute.ROOM), register.key_of(holding.room).fact())
    else:
        facts = (holding.fact(Attribute(kind.value)),)
    return _question(register, rng, kind, holding.name, facts, (holding,))


def _about_key(register: Register, rng: random.Random, room: str) -> Question:
    return _question(register, rng, Kind.HOOK, room, (register.key_of(room).fact(),), ())


def _question(
    register: Register,
    rng: random.Random,
    kind: Kind,
    name: str,
    facts: tuple[Fact, ...],
    holdings: tuple[Holding, ...],
) -> Question:
    wording = rng.choice(WORDINGS[kind]).format(name=name)
    answer = ANSWERS[kind].format(name=name, **{fact.attribute.value: fact.value for fact in facts})
    asked = tuple(AskedFact(fact, register.places[fact]) for fact in facts)
    return Question(kind, f"\nQuestion: {wording}\nAnswer:", answer, asked, holdings)
