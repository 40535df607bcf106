"""What is asked: sizes of the cases, random prompts that are the same in every run, and namespaces of their own."""

from __future__ import annotations

import random
import secrets
from array import array
from dataclasses import dataclass
from functools import cache

from benchmarks.serving.streams import Request


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, times in seconds.

    beside_tokens, open_tokens: of streams that the case ends, more than they get while prompts arrive or the cache
    service stands still. filler: of the prompts that fill the pool before. resumed_s: enough for a worker that has to
    connect again.
    """

    streams: tuple[int, ...] = (64, 1, 16, 256)
    contexts: tuple[int, ...] = (330, 4096)
    new_tokens: int = 160
    prompts: tuple[int, ...] = (600, 1024, 2048, 8192)
    repeats: int = 4
    prefix: int = 4096
    own: int = 512
    siblings: int = 8
    share_prompt: int = 8192
    decoding: int = 64
    arriving: int = 2048
    num_arriving: int = 12
    arrive_every_s: float = 0.25
    quiet_s: float = 1.0
    filler: int = 8192
    max_fillers: int = 1000
    stopped_s: float = 20.0
    resumed_s: float = 3.0
    beside_tokens: int = 2000
    open_tokens: int = 6000


# What a small model on two CPU cores answers in a few seconds.
QUICK = Sizes(
    streams=(2, 1),
    contexts=(66,),
    new_tokens=64,
    prompts=(100,),
    repeats=1,
    prefix=128,
    own=40,
    siblings=3,
    share_prompt=160,
    decoding=2,
    arriving=200,
    num_arriving=2,
    arrive_every_s=0.1,
    quiet_s=0.5,
    filler=400,
    max_fillers=4,
    stopped_s=0.5,
    resumed_s=0.5,
    beside_tokens=4000,
    open_tokens=4000,
)
# Of answers whose first token is what is timed: enough to tell a right one from a wrong one.
SHORT_ANSWER = 8


@cache
def prompt(vocab_size: int, length: int, number: int) -> bytes:
    """The random prompt of this length and number."""
    source = random.Random(f"{length}-{number}")
    return array("i", (source.randrange(vocab_size) for _ in range(length))).tobytes()


def fresh(name: str) -> str:
    """Returns a salt that nobody used, so that its namespace is empty."""
    return f"{name}-{secrets.token_hex(8)}"


def cold(tokens: bytes, max_tokens: int, name: str) -> Request:
    """A request that finds nothing cached."""
    return Request(tokens, max_tokens, fresh(name))
