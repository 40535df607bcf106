"""The demo's scenes: each shows one way a prefix is reused, compares with a cold run, and says what it expected.

A cold run is the same prompt under a new salt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from cli.client import Answer, greedy
from cli.stage import SceneResult, Stage, spoken_tokens
from cli.waiting import wait_for_host_tokens, wait_restarted
from register_qa import Kind, Question, Register, draw_questions

RESTART_WAIT_S = 60.0
# An answer that goes on behind its sentence, for scenes in which a request must still run when something happens.
LONG_ANSWER_TOKENS = 160
USERS = (Kind.ROOM, Kind.SHELF, Kind.YEAR, Kind.CONDITION, Kind.HOOK, Kind.TWO_FACTS)


class QuestionSet(NamedTuple):
    """A register, its tokens, and questions about it as prompts."""

    prefix: list[int]
    questions: Sequence[Question]
    prompts: list[list[int]]


async def _question_set(stage: Stage, number: int, count: int, kinds: Sequence[Kind] = USERS) -> QuestionSet:
    register = stage.register(number)
    questions = draw_questions(register, stage.seed, count, kinds)
    prompts = [await stage.token_ids(register.text + question.text) for question in questions]
    return QuestionSet(await stage.token_ids(register.text), questions, prompts)


async def users_of_one_register(stage: Stage) -> SceneResult:
    """Eight users ask about one register at once: one prefill for all."""
    result = SceneResult("eight users, one register")
    asked = await _question_set(stage, 1, 8)
    cold = await stage.all_cold(stage.first, asked.prompts)
    warm = await asyncio.gather(*(stage.ask(stage.first, prompt) for prompt in asked.prompts))
    result.count(warm)
    result.compare(warm, cold)
    wanted = stage.left_by_one(len(asked.prefix)) + 6 * stage.whole_pages(len(asked.prefix))
    reused = sum(answer.usage.cached_tokens for answer in warm)
    result.expect(reused >= wanted, f"expected {wanted} tokens to be reused, got {reused}")
    result.note = f"the register of {len(asked.prefix):,} tokens was computed once"
    for question, answer in list(zip(asked.questions, warm, strict=True))[:4]:
        result.show(question, answer)
    return result


async def mid_flight_sibling(stage: Stage) -> SceneResult:
    """A second question arrives while the first request still decodes, and reuses what that one has published."""
    result = SceneResult("sibling of a request that still decodes")
    asked = await _question_set(stage, 2, 2)
    first_prompt, prompt = asked.prompts
    cold = await stage.all_cold(stage.first, [prompt])
    decoding = asyncio.Event()
    earlier = asyncio.create_task(
        stage.client.generate(stage.first, first_prompt, greedy(LONG_ANSWER_TOKENS), on_answer=lambda _: decoding.set())
    )
    waiting = asyncio.create_task(decoding.wait())
    await asyncio.wait({earlier, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    sibling = await stage.ask(stage.first, prompt)
    result.expect(not earlier.done(), "the first request had finished already, so nothing was mid-flight")
    result.show(asked.questions[0], await earlier)
    result.count([sibling])
    result.compare([sibling], cold)
    result.show(asked.questions[1], sibling)
    # More than the register when the questions start alike.
    usable, got = stage.left_by_one(len(asked.prefix)), sibling.usage.cached_tokens
    result.expect(usable <= got < len(prompt), f"expected {usable} cached, got {got}")
    return result


async def conversation(stage: Stage) -> SceneResult:
    """The second turn sends the first turn's token ids back: its generated tokens hit too."""
    result = SceneResult("second turn of a conversation")
    asked = await _question_set(stage, 3, 2, (Kind.TWO_FACTS, Kind.YEAR))
    first = await stage.ask(stage.first, asked.prompts[0])
    history = asked.prompts[0] + spoken_tokens(first)
    prompt = history + await stage.further_ids(asked.questions[1].text)
    cold = await stage.all_cold(stage.first, [prompt])
    second = await stage.ask(stage.first, prompt)
    result.count([second])
    result.compare([second], cold, ties=stage.reads_decoded_otherwise)
    result.show(asked.questions[0], first)
    result.show(asked.questions[1], second)
    # All of the first turn but its last token went through the model, and the last one was left away.
    expected = stage.whole_pages(len(asked.prompts[0]) + len(first.token_ids) - 1)
    got = second.usage.cached_tokens
    result.expect(got == expected, f"expected {expected} cached, got {got}")
    result.note = f"{expected - stage.whole_pages(len(asked.prompts[0]))} of the reused tokens were generated"
    return result


async def other_worker(stage: Stage) -> SceneResult:
    """A register that one worker used twice comes to the other one through the host tier."""
    result = SceneResult("the same register on the other worker")
    if not stage.shared_tier:
        result.skipped = "no shared host tier"
        return result
    asked = await _question_set(stage, 4, 3)
    cold = await stage.all_cold(stage.second, [asked.prompts[2]])
    here = [await stage.ask(stage.first, prompt) for prompt in asked.prompts[:2]]
    usable = stage.left_by_one(len(asked.prefix))
    spilled = await wait_for_host_tokens(stage.client, stage.second, asked.prompts[2], usable)
    result.expect(spilled >= usable, f"expected {usable} tokens in the host tier, found {spilled}")
    fetched = await stage.ask(stage.second, asked.prompts[2])
    result.count([fetched])
    result.compare([fetched], cold)
    got = fetched.usage.fetched_tokens
    result.expect(got >= usable, f"expected {usable} fetched, got {got}")
    result.show(asked.questions[1], here[1])
    result.show(asked.questions[2], fetched)
    return result


async def killed_worker(stage: Stage) -> SceneResult:
    """kill -9 in the middle of a request: the retry elsewhere gives the same answer, and the worker comes back."""
    result = SceneResult("worker killed mid-request, retried")
    asked = await _question_set(stage, 5, 1, (Kind.TWO_FACTS,))
    prompt, sampling = asked.prompts[0], greedy(LONG_ANSWER_TOKENS)
    cold = await stage.cold(stage.second, prompt, sampling)
    victim = stage.supervisor.children[stage.worker_names[0]]
    restarts, killed = victim.restarts, False

    def kill_once(answer: Answer) -> None:
        nonlocal killed
        if not killed and answer.worker == stage.first and len(answer.token_ids) >= 4:
            killed = True
            victim.kill()

    answer = await stage.client.generate_with_retry((stage.first, stage.second), prompt, sampling, on_answer=kill_once)
    result.count([answer])
    result.compare([answer], [cold])
    result.show(asked.questions[0], answer)
    result.expect(killed and answer.retries == 1, f"expected one retry after the kill, saw {answer.retries}")
    await asyncio.wait_for(wait_restarted(stage.client, stage.first, victim, restarts), RESTART_WAIT_S)
    again = await stage.ask(stage.first, prompt)
    # The sentence alone, this time.
    spoken = spoken_tokens(again)
    result.expect(cold.token_ids[: len(spoken)] == spoken, "the worker that came back answers differently")
    result.note = f"{stage.worker_names[0]} is back after {victim.restarts} restart"
    return result


class Talk(NamedTuple):
    """A conversation so far."""

    tokens: list[int]
    questions: Sequence[Question]


async def traffic(stage: Stage) -> SceneResult:
    """Conversations over both workers; every fourth turn is checked against a cold run."""
    result = SceneResult("conversations over both workers")
    registers = [stage.register(6), stage.register(7)]
    talks = [await _talk(stage, registers[number % 2], number) for number in range(8)]
    turns = [number for number, talk in enumerate(talks) for _ in talk.questions]
    random.Random(stage.seed).shuffle(turns)  # noqa: S311 - users in any order, the same one each time
    asked = [0] * len(talks)
    warm: list[Answer] = []
    checked: list[tuple[Answer, Answer]] = []
    for number in turns:
        talk, worker = talks[number], stage.client.workers[number // 2 % 2]
        question = talk.questions[asked[number]]
        asked[number] += 1
        talk.tokens.extend(await stage.further_ids(question.text))
        answer = await stage.ask(worker, talk.tokens)
        warm.append(answer)
        if len(warm) % 4 == 0:
            checked.append((answer, (await stage.all_cold(worker, [talk.tokens]))[0]))
            result.show(question, answer)
        talk.tokens.extend(spoken_tokens(answer))
    result.shown = result.shown[-3:]
    result.count(warm)
    result.compare([a for a, _ in checked], [b for _, b in checked], ties=stage.reads_decoded_otherwise)
    saved = result.cached + result.fetched
    result.note = f"hit rate {saved / result.prompt:.0%}, {saved:,} of {result.prompt:,} prompt tokens saved"
    result.expect(
        saved > result.prompt // 2,
        f"expected more than half of the prompt tokens saved, got {saved} of {result.prompt}",
    )
    return result


async def _talk(stage: Stage, register: Register, number: int) -> Talk:
    """One to four turns; users of one register ask different things."""
    questions = draw_questions(register, stage.seed * 100 + number, 1 + number % 4, USERS[number % 3 :])
    return Talk(await stage.token_ids(register.text), questions)


Scene = Callable[[Stage], Awaitable[SceneResult]]

# Counted from 1. Each has registers of its own, so any of them can be played without the others.
SCENES: tuple[Scene, ...] = (
    users_of_one_register,
    mid_flight_sibling,
    conversation,
    other_worker,
    killed_worker,
    traffic,
)
