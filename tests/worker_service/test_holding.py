"""Requests wait for a sibling that is about to publish what they need; nobody else waits for them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from session.words import GroupKind, GroupSpec, Namespace, SequenceId
from tests.examples import examples
from tests.worker_service.scheduler_machine import PAGE_BYTES, VOCAB, Machine, full_group, window_group
from worker_service.core.holding import Siblings
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.scheduler_config import SchedulerConfig
from worker_service.core.sequence import QueueOrder, Request, Sequence, State

CONFIG = SchedulerConfig(
    page_tokens=4, groups=(full_group(500),), max_model_len=1000, vocab_size=VOCAB, token_budget=64, max_num_seqs=16
)
PROMPT = [token % VOCAB for token in range(41)]


def machine(**changes: object) -> Machine:
    return Machine(replace(CONFIG, **changes))  # type: ignore[arg-type]


def computed(driven: Machine) -> list[int]:
    usages = [client.usage for client in driven.clients.values()]
    return [usage.computed_tokens if usage is not None else -1 for usage in usages]


def test_equal_prompts_cost_one_prefill() -> None:
    """Eight at once: the first computes 41 tokens, the others one each, although publishes follow completion."""
    driven = machine()
    for _ in range(8):
        driven.ask(PROMPT, max_tokens=3)
    driven.run()
    driven.check_over()
    assert computed(driven) == [41] + [1] * 7


@pytest.mark.parametrize(
    ("groups", "page_tokens"),
    [
        ((full_group(40),), 32),
        ((full_group(40), full_group(40)._replace(name="second"), window_group(40, 128)), 128),
        ((full_group(40), GroupSpec("state", GroupKind.STATE, 40, PAGE_BYTES)), 64),
    ],
    ids=["plain", "deepseek-v4", "lfm2"],
)
@pytest.mark.parametrize("ends", ["equal", "own"])
def test_of_one_large_page_equal_prompts_cost_one_prefill_too(
    groups: tuple[GroupSpec, ...], page_tokens: int, ends: str
) -> None:
    """Eight at once, of a page and five tokens: of DeepSeek V4 they compute 168 tokens in all, of LFM2 104."""
    driven = machine(groups=groups, page_tokens=page_tokens, token_budget=512)
    for number in range(8):
        driven.ask([token % VOCAB for token in range(page_tokens)] + [number if ends == "own" else 0] * 5, max_tokens=2)
    driven.run()
    driven.check_over()
    assert computed(driven) == [page_tokens + 5] + [5] * 7


def test_six_requests_that_share_512_tokens_compute_these_once() -> None:
    for page_tokens in (16, 64, 128):
        driven = machine(groups=(full_group(200),), page_tokens=page_tokens, token_budget=2048)
        for number in range(6):
            driven.ask([token % VOCAB for token in range(512)] + [number] * 24)
        driven.run()
        assert computed(driven) == [536, 24, 24, 24, 24, 24]


def test_held_requests_are_admitted_mid_flight() -> None:
    """They do not wait for the sibling's answer, only for its pages."""
    driven = machine()
    first = driven.ask(PROMPT, max_tokens=50)
    second = driven.ask(PROMPT, max_tokens=2)
    for _ in range(6):
        driven.turn()
    assert driven.clients[second].usage is not None
    assert driven.clients[first].usage is None


def test_groups_of_siblings_compute_unique_tokens_only() -> None:
    """E22: 10 groups of 22 prompts with a shared start of 48 tokens, all in one queue, a tail of 3 each.

    A group may compute one page twice: for a single small page nobody is held.
    """
    driven = machine(groups=(full_group(3000),), max_num_seqs=32)
    for number in range(22):
        for group in range(10):
            driven.ask([group] * 48 + [number, 1, 2])
    driven.run()
    driven.check_over()
    unique = 10 * 48 + 220 * 3
    assert unique <= sum(computed(driven)) <= unique + 10 * 4


def test_unrelated_request_overtakes_and_order_is_kept() -> None:
    """M28, H14: the sibling is deferred, the unrelated third proceeds, and the sibling keeps its place."""
    driven = machine(token_budget=16)
    ids = [driven.ask(PROMPT), driven.ask(PROMPT), driven.ask([7] * 8)]
    driven.exchange()
    assert driven.manager.order == [ids[0], ids[2]]
    assert driven.scheduler.num_held == 1
    driven.run()
    assert driven.manager.order == [ids[0], ids[2], ids[1]]
    assert computed(driven)[1] == 1
    assert driven.scheduler.num_held == 0


@pytest.mark.parametrize(("common", "num_held"), [(3, 0), (4, 0), (7, 0), (8, 1), (11, 1)])
def test_only_two_common_pages_or_more_are_worth_it(common: int, num_held: int) -> None:
    driven = machine()
    driven.ask(PROMPT)
    driven.ask(PROMPT[:common] + [49] * 20)
    driven.exchange()
    assert driven.scheduler.num_held == num_held


@pytest.mark.parametrize(("page_tokens", "common", "num_held"), [(31, 31, 0), (31, 62, 1), (32, 31, 0), (32, 32, 1)])
def test_one_page_of_32_tokens_is_worth_it(page_tokens: int, common: int, num_held: int) -> None:
    driven = machine(page_tokens=page_tokens)
    prompt = [token % VOCAB for token in range(70)]
    driven.ask(prompt)
    driven.ask(prompt[:common] + [49] * 20)
    driven.exchange()
    assert driven.scheduler.num_held == num_held


def test_last_token_is_always_computed_so_its_page_does_not_count() -> None:
    """A prompt of exactly two pages can use one page only."""
    driven = machine()
    driven.ask(PROMPT)
    driven.ask(PROMPT[:8])
    driven.exchange()
    assert driven.scheduler.num_held == 0


def test_other_namespaces_do_not_hold() -> None:
    driven = machine()
    driven.ask(PROMPT, namespace=Namespace("model", salt="a"))
    driven.ask(PROMPT, namespace=Namespace("model", salt="b"))
    driven.exchange()
    assert driven.scheduler.num_held == 0


def test_chunk_by_chunk_the_sibling_is_let_go_when_its_part_is_there() -> None:
    """It needs the first three pages only; the long prompt goes on for ten more."""
    driven = machine(token_budget=16, max_num_seqs=4)
    long = driven.ask(PROMPT)
    short = driven.ask([*PROMPT[:12], 49])
    for _ in range(3):
        driven.turn()
    assert driven.manager.order == [long, short]
    driven.run()
    assert computed(driven) == [41, 1]


def test_aborted_sibling_lets_the_held_ones_go() -> None:
    driven = machine(token_budget=4, max_num_seqs=4)
    first = driven.ask(PROMPT)
    driven.ask(PROMPT)
    driven.turn()
    driven.abort(first)
    driven.run()
    driven.check_over()
    assert driven.clients[SequenceId(2)].usage is not None


def test_failed_sibling_lets_the_held_ones_go() -> None:
    driven = machine()
    driven.ask(PROMPT)
    driven.ask(PROMPT)
    driven.turn()
    driven.fail()
    driven.run()
    driven.check_over()
    assert computed(driven) == [-1, 41]


def test_sibling_that_fetches_holds_too() -> None:
    """So that one fetch serves all: the pages come from the host tier once."""
    driven = Machine(replace(CONFIG, groups=(full_group(20),), max_model_len=90), host=True)
    driven.ask(PROMPT)
    driven.run()
    driven.ask([7] * 80)  # pushes every page of the prompt out of the device
    driven.run()
    for _ in range(3):
        driven.ask(PROMPT)
    driven.run()
    driven.check_over()
    usages = [client.usage for client in driven.clients.values()]
    assert [usage and usage.fetched_tokens for usage in usages] == [0, 0, 40, 0, 0]
    assert [usage and usage.cached_tokens for usage in usages] == [0, 0, 0, 40, 40]


def waiting(tokens: list[int], number: int) -> Sequence:
    request = Request(SequenceId(number), Namespace("m"), array("i", tokens).tobytes(), SamplingParams())
    return Sequence(request, QueueOrder(0, number), 1)


@settings(max_examples=examples(200))
@given(
    first=st.lists(st.integers(0, 1), min_size=1, max_size=100),
    second=st.lists(st.integers(0, 1), min_size=1, max_size=100),
    shared=st.integers(0, 100),
    published=st.integers(0, 10),
    page_tokens=st.sampled_from([1, 2, 3, 31, 32]),
)
def test_hold_is_a_count_of_common_unpublished_pages(
    first: list[int], second: list[int], shared: int, published: int, page_tokens: int
) -> None:
    second = first[:shared] + second
    sibling, request = waiting(first, 1), waiting(second, 2)
    sibling.state = State.RUNNING
    sibling.published_len = min(published, len(first) // page_tokens) * page_tokens
    siblings = Siblings(page_tokens)
    siblings.admit(sibling)
    common = 0
    while common < min(len(first), len(second) - 1) and first[common] == second[common]:
        common += 1
    num_pages = common // page_tokens - sibling.published_len // page_tokens
    expected = num_pages >= (1 if page_tokens >= 32 else 2)
    holder = sibling if expected else None
    assert siblings.holder_of(request) is holder
    assert siblings.holder_of(request) is holder  # from what was kept
