from __future__ import annotations

import itertools
from collections import Counter

from cli.traffic import conversations, interleaved, system_prompt, token_requests


def test_the_same_seed_gives_the_same_traffic() -> None:
    assert conversations(7, 20) == conversations(7, 20)
    assert list(token_requests(7, 30)) == list(token_requests(7, 30))
    assert conversations(7, 20) != conversations(8, 20)


def test_every_turn_comes_once_and_in_its_own_order() -> None:
    made = conversations(1, 15)
    turns = list(interleaved(2, made, num_active=4))
    assert len(turns) == sum(len(c.messages) for c in made)
    seen: Counter[int] = Counter()
    for turn in turns:
        assert turn.turn == seen[turn.conversation]
        assert turn.text == made[turn.conversation].messages[turn.turn]
        seen[turn.conversation] += 1


def test_turns_of_different_conversations_interleave() -> None:
    order = [turn.conversation for turn in interleaved(2, conversations(1, 15), num_active=4)]
    assert any(a != b and a in order[i + 2 :] for i, (a, b) in enumerate(itertools.pairwise(order)))


def test_system_prompts_are_shared_by_conversations() -> None:
    made = conversations(3, 30, num_systems=3)
    assert len({c.system for c in made}) == 3
    assert system_prompt(5, 10) == system_prompt(5, 10)


def test_a_token_request_goes_on_from_an_earlier_one() -> None:
    requests = list(token_requests(4, 200, num_active=8))
    histories = {request.prompt + request.output for request in requests}
    continued = sum(any(request.prompt.startswith(history) for history in histories) for request in requests)
    assert continued > len(requests) // 2
