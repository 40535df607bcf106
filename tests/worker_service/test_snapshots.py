"""Snapshots from the scheduler through the real manager to a batch's states: each is taken, and none is another's.

The device of scheduler_machine.py remembers which prefix wrote each slot and checks it when a launch restores it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from session.words import GroupKind, GroupSpec, Match
from tests.examples import examples
from tests.worker_service.scheduler_machine import NAMESPACE, PAGE_BYTES, VOCAB, Machine, full_group, packed, reference
from worker_service.core.scheduler_config import SchedulerConfig


def hybrid(page_tokens: int = 16, interval: int = 0, slots: int = 64, pages: int = 2000, **changes: object) -> Machine:
    groups = (full_group(pages), GroupSpec("state", GroupKind.STATE, slots, PAGE_BYTES, 0, interval))
    config = SchedulerConfig(
        page_tokens, groups, max_model_len=20_000, vocab_size=VOCAB, token_budget=2048, max_num_seqs=16
    )
    return Machine(replace(config, **changes))  # type: ignore[arg-type]


def document(length: int, start: int = 0) -> list[int]:
    return [start, *(7 * token % 47 for token in range(length - 1))]


def computed(driven: Machine) -> list[int]:
    usages = [client.usage for client in driven.clients.values()]
    return [usage.computed_tokens if usage is not None else -1 for usage in usages]


def found(driven: Machine, tokens: list[int]) -> Match:
    (worker,) = driven.manager.manager.match(NAMESPACE, packed(tokens))
    return worker.match


# Branches that are known.


@pytest.mark.parametrize("interval", [0, 256])
@pytest.mark.parametrize("budget", [2048, 300, 496, 64])
def test_siblings_compute_a_shared_start_once(interval: int, budget: int) -> None:
    """Six requests share 512 tokens and add 24: the branch is known before the first one computes it."""
    driven = hybrid(interval=interval, token_budget=budget)
    start = document(512)
    for number in range(6):
        driven.ask([*start, *([40 + number] * 24)], max_tokens=2)
    driven.run()
    driven.check_over()
    assert computed(driven) == [536, 24, 24, 24, 24, 24]


def test_siblings_that_come_while_the_first_computes() -> None:
    """Its next extend tells the cache service of the branch."""
    driven = hybrid(token_budget=100)
    start = document(512)
    driven.ask([*start, *([40] * 24)], max_tokens=2)
    driven.turn()
    for number in range(1, 6):
        driven.ask([*start, *([40 + number] * 24)], max_tokens=2)
    driven.run()
    driven.check_over()
    assert computed(driven) == [536, 24, 24, 24, 24, 24]


def test_a_branch_behind_a_full_batch_is_known_too() -> None:
    """Only one runs at a time; the others are compared with it before it is their turn."""
    driven = hybrid(max_num_seqs=1)
    start = document(512)
    for number in range(4):
        driven.ask([*start, *([40 + number] * 24)])
    driven.run()
    driven.check_over()
    assert computed(driven) == [536, 24, 24, 24]


def test_siblings_that_part_at_several_places() -> None:
    driven = hybrid()
    start = document(600)
    for number, shared in enumerate((600, 512, 512, 256, 256)):
        driven.ask([*start[:shared], *([40 + number] * 24)])
    driven.run()
    driven.check_over()
    assert computed(driven) == [624, 24, 24, 24, 24]


def test_the_branch_is_forgotten_with_the_lease() -> None:
    driven = hybrid(token_budget=64)
    first = driven.ask([*document(512), 1])
    driven.ask([*document(512), 2])
    driven.turn()
    sequence = driven.scheduler._queues.leased[0]
    assert sequence.branches == {512}
    driven.abort(first)
    driven.run()
    driven.check_over()
    assert not sequence.branches


def test_windows_and_full_attention_name_no_branches() -> None:
    """Their pages are all there: an older cache service, which knows no branches, gets none."""
    driven = hybrid(groups=(full_group(500),))
    for number in range(3):
        driven.ask([*document(64), number])
    step = driven.scheduler.next_step()
    assert step is not None and [acquire.leave_at for acquire in step.acquires] == [()]  # type: ignore[union-attr]


# A document that is left in its middle.


@pytest.mark.parametrize(("interval", "left_at", "cached"), [(512, 2048, 2048), (512, 2300, 2048), (0, 2048, 0)])
def test_a_document_that_is_left_in_its_middle(interval: int, left_at: int, cached: int) -> None:
    """In one chunk, so that no chunk ends where the later prompt leaves."""
    driven = hybrid(64, interval, token_budget=4096)
    text = document(4096)
    driven.ask(text)
    driven.run()
    later = driven.ask([*text[:left_at], *([49] * 30)], max_tokens=3)
    driven.run()
    driven.check_over()
    usage = driven.clients[later].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.matched_tokens) == (cached, left_at // 64 * 64)
    assert usage.limiting_group == ("state" if cached < usage.matched_tokens else "")


def test_a_prompt_that_was_cut_off_resumes_at_its_last_chunk() -> None:
    """Aborted after two chunks of 640: the next request of the same prompt starts from there."""
    driven = hybrid(token_budget=640)
    first = driven.ask(document(2000))
    driven.turn()
    driven.turn()
    driven.turn()
    driven.abort(first)
    driven.run()
    again = driven.ask(document(2000))
    driven.run()
    driven.check_over()
    usage = driven.clients[again].usage
    assert usage is not None and usage.cached_tokens == 1280


# While the first still runs.


def test_case_24_a_sibling_resumes_while_the_first_still_decodes() -> None:
    """Mid-flight: 338 tokens, pages of 16; what decode computed is found as far as snapshots go."""
    driven = hybrid()
    prompt = document(338)
    first = driven.ask(prompt, max_tokens=200)
    for _ in range(30):
        driven.turn()
    assert driven.clients[first].usage is None
    second = driven.ask(prompt, max_tokens=4)
    third = driven.ask([*prompt, *reference(NAMESPACE, prompt, 20), 1], max_tokens=4)
    while driven.clients[third].usage is None or driven.clients[second].usage is None:
        driven.turn()
    assert driven.clients[first].usage is None
    usages = [driven.clients[asked].usage for asked in (second, third)]
    assert [(u.cached_tokens, u.computed_tokens) for u in usages if u is not None] == [(336, 2), (336, 23)]
    driven.run()
    driven.check_over()


# Whatever the length and the cut.

BUDGETS = (0, 300, 2048)  # 0: half a page


def check_every_snapshot(length: int, page_tokens: int, budget: int, interval: int) -> None:
    """A prompt alone leaves each snapshot that is wanted, and each is that of its own prefix."""
    budget = budget or page_tokens // 2
    driven = hybrid(page_tokens, interval, slots=600, token_budget=budget, max_num_seqs=budget if budget < 16 else 16)
    text = document(length)
    driven.ask(text)
    driven.run()
    wanted = {length // page_tokens * page_tokens, (length - 1) // page_tokens * page_tokens} - {0}
    if interval:
        wanted.update(range(interval, length + 1, interval))
    missing = [at for at in sorted(wanted) if found(driven, [*text[:at], 49]).usable_tokens != at]
    assert not missing, f"{length} tokens, pages of {page_tokens}, budget {budget}: no snapshot at {missing}"
    last = max(wanted, default=0)
    for boundary in {last, min(wanted, default=0)}:
        driven.ask([*text[:boundary], 49])
        driven.run()
    driven.check_over()
    assert computed(driven)[1:] == [1] * len({last, min(wanted, default=0)})


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("page_tokens", [16, 64, 256])
def test_h4b_no_wanted_snapshot_is_missing_at_a_coarse_step(page_tokens: int, budget: int) -> None:
    lengths = [1, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens, 800, 1024]
    for length in lengths if budget else lengths[:5]:
        check_every_snapshot(length, page_tokens, budget, 0)
        check_every_snapshot(length, page_tokens, budget, 2 * page_tokens)


@settings(max_examples=examples(50), deadline=None)
@given(
    length=st.integers(1, 4096),
    page_tokens=st.sampled_from([16, 64, 256]),
    budget=st.sampled_from(BUDGETS),
    interval=st.sampled_from([0, 256, 512]),
)
def test_h4b_no_wanted_snapshot_is_missing(length: int, page_tokens: int, budget: int, interval: int) -> None:
    check_every_snapshot(length, page_tokens, budget, interval)
