"""A single fact, and the split that it belongs to: no fact is ever both trained on and asked about."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class Attribute(StrEnum):
    ROOM = "room"
    SHELF = "shelf"
    YEAR = "year"
    CONDITION = "condition"
    HOOK = "hook"


@dataclass(frozen=True, slots=True)
class Fact:
    """`subject` is a holding's name, or for a hook the room whose key hangs there."""

    subject: str
    attribute: Attribute
    value: str


# One fact in HELD_OUT_ONE_IN is held out. With one in two a model could learn by heart which values a subject never
# has, and find an answer among the values of a register without reading whose they are.
HELD_OUT_ONE_IN = 8


def split_of(fact: Fact) -> Split:
    """By a hash that is the same in every process and version."""
    line = f"{fact.subject}|{fact.attribute.value}|{fact.value}".encode()
    return Split.TRAIN if hashlib.blake2b(line, digest_size=1).digest()[0] % HELD_OUT_ONE_IN else Split.EVAL


def draw_value(
    rng: random.Random,
    subject: str,
    attribute: Attribute,
    values: Sequence[str],
    split: Split,
    taken: Collection[str] = (),
) -> str | None:
    """One of the values that this split may pair with the subject, all as likely; None if none is left."""
    for _ in range(8):
        value = rng.choice(values)
        if value not in taken and split_of(Fact(subject, attribute, value)) is split:
            return value
    allowed = [v for v in values if v not in taken and split_of(Fact(subject, attribute, v)) is split]
    return rng.choice(allowed) if allowed else None
