"""Both sides of the vLLM connector together: what is saved is what is loaded, and what fails is computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from adapters.vllm.metadata import StepReports, WriteReport
from adapters.vllm.scheduler_side import MAX_OPEN_SAVES, SAVE_S, Scheduled
from session.words import TransferStatus
from tests.adapters.dict_tier import DictTier
from tests.adapters.stage import FULL, PAGE_TOKENS, PAUSE_S, STATE, WINDOW, FakeRequest, Stage, layout

TOKENS = list(range(5 * PAGE_TOKENS + 2))
LAYOUTS = ((FULL,), (FULL, WINDOW), (WINDOW,), (FULL, STATE))


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    made: list[Stage] = []
    yield made
    for stage in made:
        stage.close()


def tier_of(stage: Stage) -> DictTier:
    assert stage.tier is not None
    return stage.tier


def tables(stage: Stage, first: int, pages: int = 6) -> list[list[int]]:
    """Blocks of each group, no block twice."""
    return [list(range(first + group * pages, first + (group + 1) * pages)) for group in range(len(stage.spec.groups))]


def read_blocks(stage: Stage, held: Sequence[Sequence[int]], end: int) -> Iterator[tuple[int, int, int]]:
    """Group, page and block of what resuming at page `end` reads."""
    for number, (group, table) in enumerate(zip(stage.spec.groups, held, strict=True)):
        reach = {FULL: end, WINDOW: 2, STATE: 1}[group]
        for page in range(end - reach, end):
            yield number, page, table[page]


@pytest.mark.parametrize("groups", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_engine_saved_another_loads(stages: list[Stage], groups: tuple[object, ...], ranks: int) -> None:
    first = Stage(layout(*groups), ranks)  # type: ignore[arg-type]
    second = Stage(first.spec, ranks, tier=first.tier)
    stages += [first, second]
    request = FakeRequest("a", TOKENS)
    first.compute(request, tables(first, 1))
    assert (
        len(tier_of(first).rows) == sum(1 if group is STATE else 5 for group in groups) and not tier_of(first).tickets
    )

    again = FakeRequest("b", TOKENS)
    assert second.matched(again) == 5 * PAGE_TOKENS
    held = tables(second, 13)
    second.scheduler.allocated(again, held, 5 * PAGE_TOKENS)
    results = second.step()
    assert [one.finished for one in results] == [{"b"}] * ranks
    assert not any(one.failed or one.bad_blocks for one in results)
    for group, page, block in read_blocks(second, held, 5):
        for rank in range(ranks):
            assert second.contents(group, block, rank) == {request.block_hashes[page][0] + rank}
    assert [(end.status, end.num_pages) for end in tier_of(second).ends] == [(TransferStatus.DONE, 5)]


@pytest.mark.parametrize("groups", LAYOUTS)
@pytest.mark.parametrize("fault", ["missing", "torn", "store"])
def test_a_load_that_fails_is_computed_again_and_saved_again(
    stages: list[Stage], groups: tuple[object, ...], fault: str
) -> None:
    stage = Stage(layout(*groups))  # type: ignore[arg-type]
    stages.append(stage)
    tier = tier_of(stage)
    request = FakeRequest("a", TOKENS)
    stage.compute(request, tables(stage, 1))
    key = next(key for key in tier.values if key.endswith(tier.hashes(tier.lookups[0][0])[4].hex().encode()))
    if fault == "missing":
        del tier.values[key]
    elif fault == "torn":
        tier.values[key] = tier.values[key][:-1] + bytes([tier.values[key][-1] ^ 1])
    tier.store_fails = fault == "store"

    again = FakeRequest("b", TOKENS)
    assert stage.matched(again) == 5 * PAGE_TOKENS
    held = tables(stage, 13)
    stage.scheduler.allocated(again, held, 5 * PAGE_TOKENS)
    (results,) = stage.step()
    assert results.finished == {"b"}
    bad = 0 if fault == "store" else 4
    if groups == (FULL,):
        assert (results.failed, results.bad_blocks) == (set(), set(held[0][bad:5]))
    else:
        assert (results.failed, results.bad_blocks) == ({"b"}, set())
    assert tier.ends[-1].num_pages == (bad if groups == (FULL,) or fault != "store" else tier.ends[-1].num_pages)
    # The engine asks no more for this request, and what it computes now is saved anew.
    tier.store_fails = False
    stage.clock += PAUSE_S
    assert stage.matched(again) == 0
    stage.compute(again, held, computed=0)
    assert stage.matched(FakeRequest("c", TOKENS)) == 5 * PAGE_TOKENS
    assert key in tier.values


def test_other_salts_and_adapters_find_nothing(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    stage.compute(FakeRequest("a", TOKENS, cache_salt="one"), tables(stage, 1))
    assert stage.matched(FakeRequest("b", TOKENS, cache_salt="two")) == 0
    assert stage.matched(FakeRequest("c", TOKENS)) == 0
    assert stage.matched(FakeRequest("d", TOKENS, cache_salt="one")) == 5 * PAGE_TOKENS
    paths = [path for path, _ in tier_of(stage).lookups]
    assert [path.salt for path in paths] == ["one", "two", "", "one"]


def test_at_least_one_token_is_computed(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    whole = list(range(4 * PAGE_TOKENS))
    stage.compute(FakeRequest("a", whole), tables(stage, 1))
    assert len(tier_of(stage).rows) == 4
    assert stage.matched(FakeRequest("b", whole)) == 3 * PAGE_TOKENS


def test_the_scheduler_never_waits_for_a_tier_that_is_silent(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    request = FakeRequest("a", TOKENS)
    assert stage.scheduler.matched_tokens(request, 0) is None
    assert stage.scheduler.matched_tokens(request, 0) is None
    assert len(stage.thread.waiting) == 1, "asked once"
    stage.clock = 1.5
    assert stage.scheduler.matched_tokens(request, 0) == 0


def test_an_answer_that_comes_late_is_released(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    tier = tier_of(stage)
    stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    late = FakeRequest("b", TOKENS)
    assert stage.scheduler.matched_tokens(late, 0) is None
    stage.clock = 1.5
    assert stage.scheduler.matched_tokens(late, 0) == 0
    stage.scheduler.allocated(late, tables(stage, 13), 0)
    stage.thread.run()
    assert not tier.held and [end.num_pages for end in tier.ends] == [0]


@pytest.mark.parametrize("how", ["finished", "local"])
def test_answers_that_nobody_takes_are_released(stages: list[Stage], how: str) -> None:
    stage = Stage(layout())
    stages.append(stage)
    tier = tier_of(stage)
    stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    request = FakeRequest("b", TOKENS)
    assert stage.matched(request) == 5 * PAGE_TOKENS
    if how == "finished":
        stage.scheduler.finished("b")
        stage.thread.run()
        assert not tier.held
    else:
        # Meanwhile another request has computed a page of it: the tier is asked anew, for less.
        assert stage.matched(request, PAGE_TOKENS) == 4 * PAGE_TOKENS
        assert len(tier.held) == 1
    assert len(tier.ends) == 1


def test_when_the_tier_is_away_nothing_is_asked_and_nothing_staged(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    tier = tier_of(stage)
    tier.away = True
    request = FakeRequest("a", TOKENS)
    assert stage.scheduler.matched_tokens(request, 0) == 0
    orders = stage.scheduler.step([Scheduled("a", 0, len(TOKENS), tables(stage, 1))], ())
    assert not orders.stages and not stage.thread.waiting and not stage.scheduler.has_open_saves()


def test_a_tier_that_raises_finds_and_takes_nothing(stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(layout())
    stages.append(stage)
    tier = tier_of(stage)

    def fails(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(tier, "lookup", fails)
    monkeypatch.setattr(tier, "reserve", fails)
    request = FakeRequest("a", TOKENS)
    assert stage.matched(request) == 0
    stage.compute(request, tables(stage, 1))
    assert not stage.scheduler.has_open_saves() and not tier.values


def test_a_save_without_an_answer_is_given_up(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    request = FakeRequest("a", TOKENS)
    stage.scheduler.matched_tokens(request, 0)
    orders = stage.scheduler.step([Scheduled("a", 0, len(TOKENS), tables(stage, 1))], ())
    assert len(orders.stages) == 1 and stage.scheduler.has_open_saves()
    stage.clock = SAVE_S + 1
    assert not stage.scheduler.has_open_saves()
    assert stage.scheduler.step((), ()).drops == [orders.stages[0].number]
    stage.thread.run()
    assert stage.tier is not None and stage.tier.last_number and not stage.tier.tickets, "answered too late, and ended"


@pytest.mark.parametrize("told_by", [(), (1,)])
def test_a_save_that_workers_do_not_finish_ends_its_ticket(stages: list[Stage], told_by: tuple[int, ...]) -> None:
    stage = Stage(layout(), num_ranks=2)
    stages.append(stage)
    stage.scheduler.matched_tokens(FakeRequest("a", TOKENS), 0)
    stage.scheduler.step([Scheduled("a", 0, len(TOKENS), tables(stage, 1))], ())
    stage.thread.run()
    (write,) = stage.scheduler.step((), ()).writes
    tier = tier_of(stage)
    assert len(tier.tickets) == 1
    reports = [WriteReport(write.number, rank, TransferStatus.DONE, ((0, 5),)) for rank in told_by]
    stage.scheduler.reported(StepReports([], reports))
    stage.clock = SAVE_S + 1
    assert stage.scheduler.step((), ()).drops == [write.number]
    stage.thread.run()
    assert not tier.tickets and not tier.rows
    late = [WriteReport(write.number, rank, TransferStatus.DONE, ((0, 5),)) for rank in range(2)]
    stage.scheduler.reported(StepReports([], late))
    stage.thread.run()
    assert not tier.rows, "what comes later is nobody's row"
    stage.clock += PAUSE_S
    stage.compute(FakeRequest("b", TOKENS), tables(stage, 7))
    assert stage.matched(FakeRequest("c", TOKENS)) == 5 * PAGE_TOKENS


def test_open_saves_are_limited(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    num_staged = 0
    for number in range(MAX_OPEN_SAVES + 3):
        request = FakeRequest(str(number), [number] * PAGE_TOKENS + [0])
        stage.scheduler.matched_tokens(request, 0)
        num_staged += len(stage.scheduler.step([Scheduled(str(number), 0, PAGE_TOKENS + 1, [[1, 2]])], ()).stages)
    assert num_staged == MAX_OPEN_SAVES


def test_pages_that_find_no_staging_room_are_not_saved(stages: list[Stage]) -> None:
    stage = Stage(layout(), max_staged_bytes=64)
    stages.append(stage)
    tier = tier_of(stage)
    stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    assert not tier.rows and not tier.tickets, "the ticket has ended with nothing written"
    stage.compute(FakeRequest("b", list(range(100, 100 + PAGE_TOKENS))), tables(stage, 7))
    assert len(tier.rows) == 1


def test_after_a_store_has_failed_nothing_is_asked_for_a_while(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    tier = tier_of(stage)
    stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    tier.store_fails = True
    request = FakeRequest("b", TOKENS)
    assert stage.matched(request) == 5 * PAGE_TOKENS
    stage.scheduler.allocated(request, tables(stage, 13), 5 * PAGE_TOKENS)
    stage.step()
    assert tier.ends[-1].status is TransferStatus.FAILED
    asked = len(tier.lookups)
    tier.store_fails = False
    assert stage.matched(FakeRequest("c", TOKENS)) == 0
    orders = stage.scheduler.step([Scheduled("c", 0, len(TOKENS), tables(stage, 1))], ())
    assert not orders.stages and len(tier.lookups) == asked
    stage.clock += PAUSE_S
    assert stage.matched(FakeRequest("d", TOKENS)) == 5 * PAGE_TOKENS


def test_a_store_that_is_full_keeps_the_leading_pages(stages: list[Stage]) -> None:
    stage = Stage(layout())
    stages.append(stage)
    tier = tier_of(stage)
    tier.room = 2
    stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    assert len(tier.rows) == 2
    assert stage.matched(FakeRequest("b", TOKENS)) == 2 * PAGE_TOKENS


def test_a_load_that_the_engine_cut_short_counts_as_failed(stages: list[Stage]) -> None:
    """Another boundary may need other pages of a window than the ones that are held."""
    stage = Stage(layout(FULL, WINDOW))
    stages.append(stage)
    tier = tier_of(stage)
    stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    request = FakeRequest("b", TOKENS)
    assert stage.matched(request) == 5 * PAGE_TOKENS
    stage.scheduler.allocated(request, tables(stage, 13), 3 * PAGE_TOKENS)
    (results,) = stage.step()
    assert (results.finished, results.failed) == ({"b"}, {"b"})
    assert [(end.status, end.num_pages) for end in tier.ends] == [(TransferStatus.DONE, 0)], "no row is dropped for it"
    assert len(tier.rows) == 10


def test_a_state_that_has_no_block_is_no_hit(stages: list[Stage]) -> None:
    stage = Stage(layout(FULL, STATE))
    stages.append(stage)
    stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    request = FakeRequest("b", TOKENS)
    assert stage.matched(request) == 5 * PAGE_TOKENS
    held = tables(stage, 13)
    held[1][4] = 0
    stage.scheduler.allocated(request, held, 5 * PAGE_TOKENS)
    (results,) = stage.step()
    assert (results.finished, results.failed) == ({"b"}, {"b"})


def test_copies_come_before_what_overwrites_their_blocks(stages: list[Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preemption, or behind a window, a block is another request's in the very next step."""
    stage = Stage(layout())
    stages.append(stage)
    (worker,) = stage.workers
    held_back: list[int] = []
    monkeypatch.setattr(worker._copies, "hold_back_forward", lambda copies: held_back.append(len(copies)))
    request = FakeRequest("a", TOKENS)
    stage.scheduler.matched_tokens(request, 0)
    stage.step([Scheduled("a", 0, len(TOKENS), [[1, 2, 3, 4, 5, 6]])], new_blocks=[1, 2, 3, 4, 5, 6])
    assert held_back == []
    orders = stage.scheduler.step((), new_blocks=[9, 10])
    worker.before_forward(orders)
    assert held_back == [], "nobody reads those"
    orders = stage.scheduler.step((), new_blocks=[3, 10])
    worker.before_forward(orders)
    assert held_back == [1]


def test_without_host_memory_nothing_is_saved_and_the_engine_goes_on(
    stages: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(layout())
    stages.append(stage)
    tier = tier_of(stage)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory to pin")

    with monkeypatch.context() as patched:
        patched.setattr(stage.workers[0]._copies, "stage", fails)
        stage.compute(FakeRequest("a", TOKENS), tables(stage, 1))
    assert not tier.rows and not tier.tickets
    stage.compute(FakeRequest("b", TOKENS), tables(stage, 13))
    assert len(tier.rows) == 5
