"""Questions ask what the register tells, once each; answers are marked word for word."""

from __future__ import annotations

from collections import Counter

import pytest

from register_qa import ONE_FACT_KINDS, Kind, Question, Register, Split, draw_questions, draw_register, is_correct
from tests.register_qa.conversation import Turn, prompt_of, written_turn


@pytest.fixture(scope="module")
def register() -> Register:
    return draw_register(11, split=Split.EVAL, holdings=80)


def one(register: Register, kind: Kind) -> Question:
    return draw_questions(register, 0, 1, [kind])[0]


def test_the_same_seed_asks_the_same(register: Register) -> None:
    assert draw_questions(register, 5, 40) == draw_questions(register, 5, 40)
    assert draw_questions(register, 5, 40) != draw_questions(register, 6, 40)


def test_kinds_take_turns_and_nothing_is_asked_twice(register: Register) -> None:
    questions = draw_questions(register, 0, 90)
    assert set(Counter(question.kind for question in questions).values()) == {15}
    assert len({(question.kind, question.facts) for question in questions}) == 90


@pytest.mark.parametrize("kind", Kind)
def test_the_answer_is_what_the_register_tells(register: Register, kind: Kind) -> None:
    for question in draw_questions(register, 1, 16, [kind]):
        assert question.kind is kind
        assert question.text.startswith("\nQuestion: ") and question.text.endswith("?\nAnswer:")
        assert question.answer.endswith(".") and question.answer == question.answer.strip()
        for asked in question.facts:
            assert asked.fact.value in question.answer
            assert register.places[asked.fact] == asked.place
            value = register.text[asked.place.value.start : asked.place.value.end]
            assert value == asked.fact.value
        assert question.facts[0].fact.subject in question.text
        assert all(holding.name in question.text for holding in question.holdings)


def test_a_question_does_not_give_its_answer_away(register: Register) -> None:
    for question in draw_questions(register, 2, 96):
        assert not any(asked.fact.value in question.text for asked in question.facts)


def test_two_facts_need_two_lines(register: Register) -> None:
    for question in draw_questions(register, 3, 40, [Kind.TWO_FACTS]):
        where, key = question.facts
        assert where.place.line != key.place.line
        assert where.fact.value == key.fact.subject
        assert where.fact.subject not in register.text[key.place.line.start : key.place.line.end]


@pytest.mark.parametrize("kind", ONE_FACT_KINDS)
def test_the_other_kinds_need_one(register: Register, kind: Kind) -> None:
    assert len(one(register, kind).facts) == 1


def test_every_wording_is_used(register: Register) -> None:
    for kind in Kind:
        wordings = Counter(
            question.text.replace(question.facts[0].fact.subject, "")
            for question in draw_questions(register, 4, 16, [kind])
        )
        assert len(wordings) == 2


@pytest.mark.parametrize(
    ("count", "kinds", "field"),
    [(0, tuple(Kind), "count"), (81, (Kind.ROOM,), "count"), (17, (Kind.HOOK,), "count"), (5, (), "kinds")],
)
def test_what_cannot_be_asked_is_named(register: Register, count: int, kinds: tuple[Kind, ...], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        draw_questions(register, 0, count, kinds)


def test_marking_forgives_white_space_and_nothing_else(register: Register) -> None:
    question = one(register, Kind.ROOM)
    assert is_correct(question, question.answer)
    assert is_correct(question, f" {question.answer}\n")
    assert not is_correct(question, question.answer[:-1])
    assert not is_correct(question, question.answer.lower())
    assert not is_correct(question, f"{question.answer} {question.answer}")
    assert not is_correct(question, "")


def test_another_register_answers_otherwise(register: Register) -> None:
    other = draw_register(12, split=Split.EVAL, holdings=80)
    shared = set(register.places) & set(other.places)
    assert len(shared) < 0.02 * len(register.places)


def test_each_prompt_of_a_conversation_extends_the_one_before(register: Register) -> None:
    first, second, third = draw_questions(register, 8, 3)
    turns = [Turn(first, f" {first.answer}"), Turn(second, second.answer)]
    prompts = [
        prompt_of(register, first),
        prompt_of(register, second, turns[:1]),
        prompt_of(register, third, turns),
    ]
    assert prompts[0] == register.text + first.text
    for earlier, later, turn in zip(prompts, prompts[1:], turns, strict=False):
        assert later.startswith(f"{earlier} {turn.question.answer}\nQuestion:")
    assert prompts[2].endswith(f"Answer: {second.answer}{third.text}")
    assert written_turn(turns[0]) == f"{first.text} {first.answer}"
