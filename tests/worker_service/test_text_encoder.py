"""Texts become tokens beside the event loop: how much of a text is read, how many wait, and who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator

import pytest

from worker_service.core.errors import InvalidField, QueueFull
from worker_service.serving.codec import VocabLimits
from worker_service.serving.text_encoder import (
    HEAD_CHARS_PER_TOKEN,
    LONG_CHARS_PER_TOKEN,
    MAX_CHARS_PER_TOKEN,
    SHORT_TEXT_CHARS,
    TextEncoder,
)

MAX_MODEL_LEN = 1000
LIMITS = VocabLimits(256, MAX_MODEL_LEN)
HEAD = HEAD_CHARS_PER_TOKEN * MAX_MODEL_LEN
LONG = LONG_CHARS_PER_TOKEN * MAX_MODEL_LEN


class Toy:
    """A token for each `chars_per_token` characters; `gate`, when closed, holds every call in a thread."""

    def __init__(self, chars_per_token: int = 4) -> None:
        self.chars_per_token = chars_per_token
        self.read: list[int] = []
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(30)
        self.read.append(len(text))
        return [ord(text[at]) % 256 for at in range(0, len(text), self.chars_per_token)]


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def encoder(toy: Toy) -> Iterator[TextEncoder]:
    made = TextEncoder(toy, LIMITS, max_queued=3)
    yield made
    toy.gate.set()
    made.close()


async def test_a_prompt_is_packed_and_a_short_one_needs_no_thread(toy: Toy, encoder: TextEncoder) -> None:
    assert await encoder.prompt("abcdefgh", special_tokens=True) == array("i", [97, 101]).tobytes()
    assert toy.threads == [threading.main_thread().name]
    await encoder.prompt("x" * (SHORT_TEXT_CHARS + 1), special_tokens=True)
    assert toy.threads[1].startswith("tokenizer_")


async def test_a_long_text_is_refused_by_its_head(toy: Toy, encoder: TextEncoder) -> None:
    toy.chars_per_token = 1
    with pytest.raises(InvalidField, match=f"first {HEAD} of {100 * MAX_MODEL_LEN} characters"):
        await encoder.prompt("x" * 100 * MAX_MODEL_LEN, special_tokens=True)
    assert toy.read == [HEAD]


async def test_a_text_beyond_every_prompt_is_not_read(toy: Toy, encoder: TextEncoder) -> None:
    with pytest.raises(InvalidField, match="characters"):
        await encoder.prompt("x" * (MAX_CHARS_PER_TOKEN * MAX_MODEL_LEN + 1), special_tokens=True)
    assert not toy.read


async def test_a_long_text_of_few_tokens_is_a_prompt(toy: Toy, encoder: TextEncoder) -> None:
    toy.chars_per_token = 100
    packed = await encoder.prompt("x" * 90 * MAX_MODEL_LEN, special_tokens=True)
    assert len(packed) == 4 * 900
    assert toy.read == [*(HEAD << at for at in range(6)), 90 * MAX_MODEL_LEN]


async def test_what_waits_is_bounded_and_cancelled_texts_are_not_read(toy: Toy, encoder: TextEncoder) -> None:
    toy.gate.clear()
    text = "x" * (SHORT_TEXT_CHARS + 1)
    waiting = [asyncio.create_task(encoder.prompt(text, special_tokens=True)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await encoder.prompt(text, special_tokens=True)
    waiting[2].cancel()
    for _ in range(10):  # the loop tells the thread's queue in a later round
        await asyncio.sleep(0)
    toy.gate.set()
    await asyncio.gather(*waiting[:2])
    await encoder.prompt(text, special_tokens=True)
    assert len(toy.read) == 3


async def test_a_usual_text_does_not_wait_for_a_long_one(toy: Toy, encoder: TextEncoder) -> None:
    toy.gate.clear()
    long = asyncio.create_task(encoder.prompt("x" * (LONG + 1), special_tokens=True))
    while not toy.threads:
        await asyncio.sleep(0.001)
    usual = asyncio.create_task(encoder.prompt("x" * 3000, special_tokens=True))
    while len(toy.threads) < 2:
        await asyncio.sleep(0.001)
    assert toy.threads[0] != toy.threads[1]
    toy.gate.set()
    assert len(await usual) == 3000
    with pytest.raises(InvalidField):
        await long
