"""Explain tells when pages were last used and when they went: never outside of the bounds that it names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache_service.core.base.types import Age, Explanation, Residence
from cache_service.core.device.unit_times import MOST_SAMPLES, UnitTimes
from cache_service.core.verbs.ages import SAME_MS
from session.words import HostTierKind, MissReason
from tests.core.at_once import clear_at_once
from tests.core.driver import FakeWorker
from tests.core.world import NS, Live, World, full, pack
from tests.examples import examples

PAGE = 2
IN_USE = Age(0, 0)
LAST_TOKEN = 0  # never a part of a whole page, so that all others may be


def prompt_of(pages: Sequence[int]) -> list[int]:
    """Each path has page tokens of its own: marks take prompts that agree on two pages for one another."""
    tokens, path = [], 1
    for page in pages:
        path = 4 * path + page // 10
        tokens += [2 * path, 2 * path + 1]
    return [*tokens, LAST_TOKEN]


class Stage:
    """A worker with a small pool, and when each path was held and evicted, page by page."""

    def __init__(self, num_pages: int, tier: HostTierKind = HostTierKind.NONE) -> None:
        self.world = World(host_quota_bytes=1 << 20)
        self.worker = FakeWorker(self.world, [full(num_pages)], PAGE, host_tier=tier)
        self.live: list[tuple[tuple[int, ...], Live]] = []
        self.held_ms: dict[tuple[int, ...], int] = {}
        self.gone_ms: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def begin(self, pages: tuple[int, ...]) -> None:
        answer = self.worker.submit(prompt_of(pages))
        if isinstance(answer, Live):
            self.worker.fetch_all(answer)
            self.worker.prefill(answer)
            self.live.append((pages, answer))
        self.note()

    def finish(self, at: int) -> None:
        if self.live:
            self.worker.release(self.live.pop(at % len(self.live))[1])
            self.note()

    def spill(self, _: int) -> None:
        self.worker.spill_all()
        self.note()

    def pass_time(self, ms: int) -> None:
        """Between two ticks of the manager, or over one."""
        if ms % 2:
            self.world.tick(ms)
        else:
            self.world.now_ms += ms
        self.note()

    def note(self) -> None:
        for pages, _ in self.live:
            for end in range(1, len(pages) + 1):
                self.held_ms[pages[:end]] = self.world.now_ms
        for path in list(self.held_ms):
            if self.world.tokens_cached(prompt_of(path)) < PAGE * len(path):
                del self.held_ms[path]
                self.gone_ms[path].append(self.world.now_ms)

    def explain(self, pages: Sequence[int]) -> Explanation:
        slices = self.world.manager.explaining(NS, pack(prompt_of(pages)), None, self.world.now_ms)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                (explained,) = end.value
                assert isinstance(explained, Explanation)
                return explained

    def check(self, pages: tuple[int, ...]) -> None:
        explained, now_ms, cached = self.explain(pages), self.world.now_ms, 0
        used = [segment for segment in explained.segments if segment.residence is Residence.DEVICE]
        for segment in used:
            age = segment.last_used
            assert age is not None and segment.first_token == cached
            cached += segment.num_tokens
            for end in range(segment.first_token // PAGE + 1, cached // PAGE + 1):
                unused_ms = now_ms - self.held_ms[pages[:end]]
                is_spilled = age == IN_USE and bool(self.worker.spills)
                assert age.least_ms <= unused_ms <= age.most_ms or is_spilled
            assert age.most_ms < max(2 * age.least_ms, age.least_ms + SAME_MS)
        assert cached == explained.match.usable_tokens
        assert all(one.last_used.most_ms < other.last_used.most_ms for one, other in pairwise(used))  # type: ignore[union-attr]
        gone = explained.segments[-1].gone
        assert (gone is not None) == (explained.segments[-1].miss_reason is MissReason.EVICTED)
        if gone is not None:
            path = pages[: explained.match.matched_tokens // PAGE + 1]
            assert any(gone.least_ms <= now_ms - at_ms <= gone.most_ms for at_ms in self.gone_ms[path])


PAGES = st.lists(st.sampled_from([10, 20]), min_size=1, max_size=5).map(tuple)
ACTS = st.one_of(
    st.tuples(st.just("begin"), PAGES),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("spill"), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([1, 2, 40, 999, 5_000, 100_001])),
)


# The host tier brings what was evicted: what is left is the tail of a page.
BROUGHT: list[tuple[str, object]] = [
    ("begin", (10, 20, 10)),
    ("begin", (10, 20, 10)),
    ("begin", (10,)),
    ("begin", (10,)),
    ("finish", 0),
    ("finish", 0),
    ("spill", 0),
    ("begin", (10, 10, 10, 10, 10)),
]


@example(acts=BROUGHT, tier=HostTierKind.PRIVATE)
@settings(max_examples=examples(60), deadline=None)
@given(acts=st.lists(ACTS, max_size=30), tier=st.sampled_from([HostTierKind.NONE, HostTierKind.PRIVATE]))
def test_the_true_ages_lie_within_the_bounds(acts: list[tuple[str, object]], tier: HostTierKind) -> None:
    stage = Stage(9, tier)
    asked: set[tuple[int, ...]] = set()
    for act, value in acts:
        if act == "begin":
            assert isinstance(value, tuple)
            stage.begin(value)
            asked.add(value)
        else:
            assert isinstance(value, int)
            {"finish": stage.finish, "spill": stage.spill, "wait": stage.pass_time}[act](value)
        for pages in sorted(asked):
            stage.check(pages)


def test_what_sequences_hold_is_in_use_and_the_rest_as_old_as_its_release() -> None:
    stage = Stage(20)
    stage.begin((10, 10, 10))
    stage.finish(0)
    stage.pass_time(5_000)
    stage.begin((10, 20))
    stage.finish(0)
    stage.pass_time(42_000)
    told = stage.explain((10, 10, 10)).segments
    assert [(one.num_tokens, one.last_used) for one in told] == [(6, Age(42_000, 47_000)), (1, None)]
    stage.pass_time(60_000)
    stage.begin((10,))
    told = stage.explain((10, 10, 10)).segments
    assert [(one.num_tokens, one.last_used) for one in told] == [(2, IN_USE), (4, Age(107_000, 107_000)), (1, None)]


def test_what_was_evicted_or_cleared_says_when() -> None:
    stage = Stage(4)
    stage.begin((10, 10))
    stage.finish(0)
    stage.pass_time(3_001)
    stage.begin((20, 20, 20))
    stage.pass_time(1)
    stage.pass_time(7_001)
    assert stage.explain((10, 10)).segments[-1].gone == Age(7_001, 7_002)
    assert stage.explain((30,)).segments[-1].gone is None
    stage.finish(0)
    clear_at_once(stage.world.manager, None, unused_only=False)
    stage.pass_time(500)
    (gone,) = [one.gone for one in stage.explain((20, 20, 20)).segments]
    assert gone is not None and gone.least_ms <= 500 <= gone.most_ms <= 501


def test_the_first_pages_to_go_are_told_to_the_tick_whatever_the_pool() -> None:
    stage = Stage(400)
    stage.begin((10, 10))
    stage.finish(0)
    stage.pass_time(100_001)
    stage.pass_time(50)
    clear_at_once(stage.world.manager, None, unused_only=False)
    stage.pass_time(51)
    stage.pass_time(9_000)
    assert [one.gone for one in stage.explain((10, 10)).segments] == [Age(9_000, 9_101)]


def test_a_spill_that_ends_late_is_no_use() -> None:
    world = World(host_quota_bytes=1 << 20)
    worker = FakeWorker(world, [full(20)], PAGE, host_tier=HostTierKind.PRIVATE)
    worker.run(prompt_of((10, 10)))
    world.tick(1_000)
    worker.run(prompt_of((10, 20)))
    assert worker.spills
    world.tick(9_000)
    worker.spill_all()
    world.tick(1_000)
    slices = world.manager.explaining(NS, pack(prompt_of((10, 10))), None, world.now_ms)
    ages = []
    try:
        while True:
            next(slices)
    except StopIteration as end:
        ages = [one.last_used for one in end.value[0].segments]
    assert ages == [Age(10_000, 11_000), None]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=40))
def test_a_cut_lies_within_the_window_of_its_unit(steps: list[tuple[int, int, bool]]) -> None:
    """Four pages are a unit. Each step lets time pass, cuts pages, and may tick."""
    times, now_ms, cut_pages = UnitTimes(100), 100, 0
    cuts: list[tuple[int, int]] = []
    for ms, num_pages, has_tick in steps:
        now_ms += ms
        for _ in range(num_pages):
            cut_pages += 1
            cuts.append((cut_pages // 4 + 1, now_ms))
        if has_tick:
            now_ms += 1
            times.seen(cut_pages // 4 + 1, cut_pages, now_ms)
        for unit, at_ms in cuts:
            after_ms, until_ms = times.window(unit, cut_pages)
            assert after_ms <= at_ms <= (now_ms if until_ms is None else until_ms)


def test_samples_are_bounded_and_begin_anew_with_the_table() -> None:
    times, last = UnitTimes(0), 3 * MOST_SAMPLES
    for unit in range(1, last + 1):
        times.seen(unit, 16 * unit, 10 * unit)
    assert times.window(last - 5, 16 * last) == (10 * (last - 6), 10 * (last - 4))
    assert times.window(last, 16 * last) == (10 * (last - 1), 10 * last)
    assert times.window(last, 16 * last + 1) == (10 * (last - 1), None)
    assert times.window(last - MOST_SAMPLES + 2, 16 * last).after_ms == 10 * (last - MOST_SAMPLES + 1)
    assert times.window(1, 16 * last).after_ms == 0
    times.seen(1, 3, 99_999)
    assert times.window(1, 3) == (10 * last, 99_999)
