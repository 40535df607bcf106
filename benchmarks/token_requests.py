"""Seeded requests as packed token ids, for driving the manager alone: shared system prompts and growing histories.

The outputs are random tokens. The same seed gives the same requests everywhere.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

from cli.replay.replay import VOCABULARY, Request


def token_requests(seed: int, num_requests: int, *, num_active: int = 64) -> Iterator[Request]:
    """Requests for driving the manager alone; a fifth of them starts a new conversation on one of eight system prompts.

    Lengths are log-normal around 400 tokens for a message and 250 for an answer.
    """
    rng = random.Random(seed)
    systems = [_tokens(rng, rng.randint(200, 3000)) for _ in range(8)]
    histories = [array("i", systems[0]) for _ in range(num_active)]
    for _ in range(num_requests):
        at = rng.randrange(num_active)
        if rng.random() < 0.2:
            histories[at] = array("i", rng.choice(systems))
        history = histories[at]
        history.extend(_tokens(rng, _length(rng, 400)))
        output = _tokens(rng, _length(rng, 250))
        yield Request(history.tobytes(), output.tobytes())
        history.extend(output)


def _tokens(rng: random.Random, num_tokens: int) -> array[int]:
    return array("i", (rng.randrange(VOCABULARY) for _ in range(num_tokens)))


def _length(rng: random.Random, median: int) -> int:
    return min(int(median * rng.lognormvariate(0.0, 0.8)) + 1, median * 20)
