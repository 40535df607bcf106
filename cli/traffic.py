"""A seeded generator of multi-turn conversations: shared system prompts, growing histories, interleaved users.

Knows no model and no service. The same seed gives the same traffic everywhere: as text for the demo, and as packed
token ids (with the model's answers made up) for driving the manager alone.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import NamedTuple

TOOLS = ("lathe", "kiln", "loom", "anvil", "press", "furnace", "crane", "pump")
PARTS = ("bearing", "valve", "gasket", "spindle", "flange", "rotor", "belt", "nozzle")
VERBS = ("calibrate", "inspect", "replace", "grease", "align", "drain", "seal", "balance")
UNITS = ("daily", "weekly", "every 40 hours", "before each run", "after cooling", "twice a season")
QUESTIONS = (
    "How often do I {verb} the {part} of the {tool}?",
    "The {tool} is loud. Is it the {part}?",
    "Which comes first, to {verb} the {part} or to stop the {tool}?",
    "Write a short note for the next shift about the {part} of the {tool}.",
)


class Turn(NamedTuple):
    """One user message. `conversation` numbers the history that it goes on from; `turn` counts from 0."""

    conversation: int
    turn: int
    text: str


class Conversation(NamedTuple):
    system: str
    messages: tuple[str, ...]


class TokenRequest(NamedTuple):
    """A request as packed int32 token ids; `output` is what the model is supposed to have answered."""

    prompt: bytes
    output: bytes


def system_prompt(seed: int, num_sentences: int) -> str:
    """A manual of `num_sentences` rules; the long prefix that many requests share."""
    rng = random.Random(seed)  # noqa: S311 - reproducible traffic, not a secret
    lines = [f"You answer questions about workshop number {seed % 97 + 1}. Be brief."]
    lines += [
        f"Rule {i + 1}: {rng.choice(VERBS)} the {rng.choice(PARTS)} of the {rng.choice(TOOLS)} {rng.choice(UNITS)}."
        for i in range(num_sentences)
    ]
    return "\n".join(lines) + "\n"


def conversations(
    seed: int, num_conversations: int, *, num_systems: int = 3, num_rules: int = 24
) -> list[Conversation]:
    """Conversations of one to five user messages over a few shared system prompts."""
    rng = random.Random(seed)  # noqa: S311
    systems = [system_prompt(seed * 31 + i, num_rules) for i in range(num_systems)]
    made = []
    for _ in range(num_conversations):
        messages = tuple(
            rng.choice(QUESTIONS).format(verb=rng.choice(VERBS), part=rng.choice(PARTS), tool=rng.choice(TOOLS))
            for _ in range(rng.randint(1, 5))
        )
        made.append(Conversation(rng.choice(systems), messages))
    return made


def interleaved(seed: int, made: list[Conversation], *, num_active: int = 8) -> Iterator[Turn]:
    """The turns of all conversations as they would arrive with `num_active` users at a time; each in its own order."""
    rng = random.Random(seed)  # noqa: S311
    waiting = list(range(len(made)))
    waiting.reverse()
    active: list[tuple[int, int]] = []
    while waiting or active:
        while waiting and len(active) < num_active:
            active.append((waiting.pop(), 0))
        at = rng.randrange(len(active))
        conversation, turn = active[at]
        yield Turn(conversation, turn, made[conversation].messages[turn])
        if turn + 1 < len(made[conversation].messages):
            active[at] = (conversation, turn + 1)
        else:
            active.pop(at)


def token_requests(
    seed: int, num_requests: int, *, num_active: int = 64, vocab_size: int = 151_000
) -> Iterator[TokenRequest]:
    """Requests for driving the manager alone; a fifth of them starts a new conversation on one of eight system prompts.

    Lengths are log-normal around 400 tokens for a message and 250 for an answer.
    """
    rng = random.Random(seed)  # noqa: S311
    systems = [_tokens(rng, rng.randint(200, 3000), vocab_size) for _ in range(8)]
    histories = [array("i", systems[0]) for _ in range(num_active)]
    for _ in range(num_requests):
        at = rng.randrange(num_active)
        if rng.random() < 0.2:
            histories[at] = array("i", rng.choice(systems))
        history = histories[at]
        history.extend(_tokens(rng, _length(rng, 400), vocab_size))
        output = _tokens(rng, _length(rng, 250), vocab_size)
        yield TokenRequest(history.tobytes(), output.tobytes())
        history.extend(output)


def _tokens(rng: random.Random, num_tokens: int, vocab_size: int) -> array[int]:
    return array("i", (rng.randrange(vocab_size) for _ in range(num_tokens)))


def _length(rng: random.Random, median: int) -> int:
    return min(int(median * rng.lognormvariate(0.0, 0.8)) + 1, median * 20)
