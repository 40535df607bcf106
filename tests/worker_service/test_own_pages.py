"""Rows take pages by themselves while the cache service says nothing: which ones, and what is cached afterwards.

The device remembers which prefix wrote each slot, so a page that somebody still read would fail the test.
"""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.worker_service.inventory_truth import check_inventory, num_cut_off, pages_in_tables
from tests.worker_service.layouts import full_only, two_full, window_only, with_intervals, with_state, with_window
from tests.worker_service.scheduler_machine import NAMESPACE, Machine, full_group, window_group
from tests.worker_service.test_restoration import SHAPES, TRUNK, ask_all, machine
from tests.worker_service.test_scheduler_liveness import Layout, Workload, configs
from worker_service.core.inventory import Written

PROMPTS = [[first] * 25 for first in range(1, 5)]


def decoding(driven: Machine, prompt: list[int], num_tokens: int) -> int:
    """A request that has begun to decode."""
    asked = driven.ask(prompt, num_tokens)
    while not driven.clients[asked].tokens:
        driven.turn()
    return asked


def go_on_alone(driven: Machine, num_turns: int = 1_000) -> int:
    """Returns how many turns did something before all stood still, with two launches in flight."""
    for turn in range(num_turns):
        happened = driven.exchange()
        happened |= driven.start() | driven.start_ahead()
        happened |= driven.end_launch()
        check_inventory(driven)
        if not happened:
            return turn
    raise AssertionError("it does not end")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("restarted", [False, True])
def test_in_a_full_pool_a_stream_reaches_its_end_without_the_service(shape: str, restarted: bool) -> None:
    groups = tuple(spec._replace(num_pages=24) for spec in SHAPES[shape])
    driven = machine(shape, groups=groups)
    ask_all(driven, PROMPTS[:3])
    stream = decoding(driven, TRUNK, 60)
    driven.lose_service()
    go_on_alone(driven)
    assert len(driven.clients[stream].tokens) == 60
    driven.find_service(restarted=restarted)
    driven.run()
    assert not driven.manager.run_refusals
    driven.check_over()
    (cached,) = ask_all(driven, [TRUNK + driven.clients[stream].tokens[:40]])
    # What it had computed is findable; there is no snapshot of a state at token 52.
    assert cached == 52 or shape in ("state", "all")
    check_inventory(driven)


def test_the_ends_of_the_least_recently_used_prompts_go_first() -> None:
    driven = machine(groups=(full_group(24),))
    ask_all(driven, PROMPTS[:3])
    ask_all(driven, PROMPTS[:1])
    stream = decoding(driven, TRUNK, 30)
    driven.lose_service()
    go_on_alone(driven)
    assert len(driven.clients[stream].tokens) == 30
    driven.find_service()
    driven.run()
    assert ask_all(driven, [PROMPTS[0]]) == [24], "used last, so all of it is there"
    cached = driven.manager.cached_tokens
    second, third = (cached(driven.clients[stream].namespace, PROMPTS[at]) for at in (1, 2))
    assert second < third == 24
    driven.check_over()


@pytest.mark.parametrize("num_second", [18, 20, 23])
def test_what_prompts_share_goes_last_in_each_full_group(num_second: int) -> None:
    """Four prompts share three pages, and have two of their own: of the oldest ones these go, and nothing else."""
    second = full_group(num_second)._replace(name="second")
    driven = machine(groups=(full_group(20), second))
    prompts = [TRUNK[:12] + [20 + number] * 9 for number in range(4)]
    ask_all(driven, prompts)
    num_pages = min(20, num_second)
    stream = decoding(driven, [9, 9, 9], 4 * (num_pages - 7) - 3)
    driven.lose_service()
    go_on_alone(driven)
    assert driven.clients[stream].usage is not None
    driven.find_service()
    driven.run()
    assert not driven.manager.run_refusals
    cached = [driven.manager.cached_tokens(NAMESPACE, prompt) for prompt in prompts]
    assert cached == [12, 12, 20, 20]
    check_inventory(driven)
    driven.check_over()


def test_a_group_whose_pages_are_taken_later_follows_the_leading_one_through_what_is_gone_there() -> None:
    """It had three more free pages: six known ones go of the leading group, of the oldest prompt first, three of it."""
    driven = machine(groups=(full_group(24), full_group(27)._replace(name="second")))
    prompts = [TRUNK[:12] + [20 + number] * 17 for number in range(3)]
    ask_all(driven, prompts)
    stream = decoding(driven, [9, 9, 9], 4 * 15 - 3)
    driven.lose_service()
    go_on_alone(driven)
    assert driven.clients[stream].usage is not None
    driven.find_service()
    driven.run()
    assert [driven.manager.cached_tokens(NAMESPACE, prompt) for prompt in prompts] == [12, 20, 28]
    driven.check_over()


@pytest.mark.parametrize(("read", "order"), [(0, [2, 3, 4, 6, 5, 1]), (2, [2, 3, 4, 5, 1, 6])])
def test_pages_of_a_full_group_that_no_prompt_needs_go_first_and_each_page_goes_once(
    read: int, order: list[int]
) -> None:
    """Two pages hold the same, and one may stand beside a page that a sequence reads with another one."""
    driven = machine(groups=(full_group(6), full_group(6)._replace(name="second")))
    tokens = array("i", range(12))
    leading = array("i", [1, 2, 3])
    for second, end in (([4, 5, 6], 3), ([1, 5, 6], 1)):
        tables = [leading, array("i", second)]
        driven.scheduler.inventory.record(Written(NAMESPACE, tokens, tables, 0, 0, end))
    own_pages = driven.scheduler._own_pages
    use = bytearray(page_id in (0, read) for page_id in range(7))
    own_pages._use_of = lambda group: use  # type: ignore[method-assign]
    assert list(own_pages._in_order(1, bytearray([1] + [0] * 6))) == order


def test_pages_that_live_sequences_use_are_never_taken() -> None:
    """All but a page is in use: one stream gets it, the others wait for the service and lose nothing."""
    driven = machine(groups=(full_group(13),), max_num_seqs=3)
    streams = [decoding(driven, [first] * 14, 30) for first in (1, 2, 3)]
    driven.lose_service()
    go_on_alone(driven)
    assert all(len(driven.clients[stream].tokens) < 30 for stream in streams)
    driven.find_service()
    driven.run()
    driven.check_over()


def test_a_request_that_ends_meanwhile_leaves_its_pages_to_the_others() -> None:
    driven = machine(groups=(full_group(13),), max_num_seqs=3)
    streams = [decoding(driven, [first] * 14, count) for first, count in ((1, 30), (2, 3), (3, 3))]
    driven.lose_service()
    go_on_alone(driven)
    assert [len(driven.clients[stream].tokens) for stream in streams] == [30, 3, 3]
    driven.find_service()
    driven.run()
    driven.check_over()


def test_windows_reuse_what_they_left_behind_before_they_take_what_is_cached() -> None:
    driven = machine(groups=(full_group(60), window_group(10, 6)))
    ask_all(driven, [PROMPTS[0]])
    stream = decoding(driven, TRUNK, 80)
    driven.lose_service()
    go_on_alone(driven)
    assert len(driven.clients[stream].tokens) == 80
    driven.find_service()
    driven.run()
    assert ask_all(driven, [PROMPTS[0]]) == [24]
    driven.check_over()


def test_all_pages_that_a_window_reads_where_requests_resumed_last_go_last() -> None:
    """A start that all prompts share was computed first; its window's pages are older than those of everything else."""
    driven = machine(groups=(full_group(80), window_group(24, 12)))
    start = list(range(1, 25))
    ask_all(driven, [[*start, 30], [*start, 31], *PROMPTS[:3]])
    assert ask_all(driven, [[*start, 32]]) == [24]
    streams = [decoding(driven, [40 + number], 14) for number in range(2)]
    assert not driven.manager.cache.groups[1].pool.num_free
    driven.lose_service()
    go_on_alone(driven)
    assert all(driven.clients[stream].usage for stream in streams)
    driven.find_service()
    driven.run()
    assert ask_all(driven, [[*start, 33]]) == [24]
    driven.check_over()


def test_a_prompt_goes_on_as_well() -> None:
    driven = machine(groups=(full_group(60),), token_budget=8)
    driven.ask(list(range(1, 41)), 3)
    driven.turn()
    driven.turn()
    driven.lose_service()
    go_on_alone(driven)
    assert driven.clients[1].usage is not None
    driven.find_service()
    driven.run()
    driven.check_over()


def test_sequences_that_wait_to_be_adopted_run_on_when_the_service_goes_again() -> None:
    driven = machine(groups=(full_group(40),))
    streams = [decoding(driven, [first] * 14, 30) for first in (1, 2)]
    driven.lose_service()
    driven.find_service()
    assert driven.scheduler.num_adopting == 2
    assert driven.scheduler.has_stalled_rows()
    driven.lose_service(step_arrived=True)
    assert not driven.scheduler.num_adopting
    go_on_alone(driven)
    assert [len(driven.clients[stream].tokens) for stream in streams] == [30, 30]
    driven.find_service()
    driven.run()
    driven.check_over()


def test_a_stream_stalls_once_its_pages_are_full() -> None:
    driven = machine(groups=(full_group(40),), decode_ahead_tokens=20)
    decoding(driven, TRUNK, 60)
    driven.end_launches()
    assert not driven.scheduler.has_stalled_rows()
    while driven.start() and driven.end_launch():
        pass
    assert driven.scheduler.has_stalled_rows()


@pytest.mark.parametrize("layout", [full_only, two_full, with_window, window_only, with_state, with_intervals])
@settings(max_examples=examples(60))
@given(data=st.data(), seed=st.integers(0, 1 << 32), num_requests=st.integers(1, 14), host=st.booleans())
def test_no_page_of_the_inventory_is_wrong_after_rows_took_pages(
    data: st.DataObject, seed: int, num_requests: int, host: bool, layout: Layout
) -> None:
    config = data.draw(configs(layout))
    rng = random.Random(seed)
    driven = Machine(config, host=host, rng=rng)
    workload, num_taken = Workload(driven, rng, num_requests, with_faults=True, ahead=True), 0
    take_pages = driven.scheduler.take_pages

    def counted() -> int:
        nonlocal num_taken
        in_tables = pages_in_tables(driven)
        before = num_cut_off(driven, in_tables)
        num_taken += (taken := take_pages())
        check_inventory(driven)
        assert num_cut_off(driven, in_tables) <= before, "a prompt lost its beginning before its end"
        return taken

    driven.scheduler.take_pages = counted  # type: ignore[method-assign]
    workload.chance = lambda probability: rng.random() < 3 * probability  # type: ignore[method-assign]
    workload.run()
    check_inventory(driven)
    driven.check_over()
    event(f"took pages: {num_taken > 0}")
