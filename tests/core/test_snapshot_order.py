"""Which snapshot goes next, against a plain model: lists that are sorted anew at each question."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.core.device.eviction_order import Lru, Priority
from cache_service.core.device.radix_node import Node, Root
from cache_service.core.device.snapshot_order import SnapshotPages
from cache_service.core.device.sparse_pages import Retention
from session.words import NO_PAGE
from tests.core.driver import FakeWorker
from tests.core.test_cases_pages import span
from tests.core.world import NS, World, full, state
from tests.examples import examples

SLOTS = 8
LONGEST = 64


@dataclass
class Kept:
    depth: int
    is_cold: bool
    is_restored: bool
    rank: int
    stamp: int


class Model:
    """What the module's text says, by the letter."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}  # by page number
        self.floor = self.clock = 0

    def use(self, page: int, *, is_cold: bool, is_restored: bool) -> None:
        self.clock += 1
        self.kept[page] = Kept(page + 1, is_cold, is_restored, self.floor + page + 1, self.clock)
        restored = [kept for kept in self.kept.values() if kept.is_restored]
        if len(restored) > SLOTS // 4:
            self.clock += 1
            first = min(restored, key=lambda kept: (kept.rank, kept.stamp))
            first.is_restored, first.rank, first.stamp = False, self.floor + first.depth, self.clock

    def victim(self) -> int:
        def order(page: int) -> tuple[bool, bool, int, int]:
            kept = self.kept[page]
            return not kept.is_cold, kept.is_restored, kept.rank, kept.stamp

        page = min(self.kept, key=order)
        kept = self.kept.pop(page)
        if not kept.is_cold:
            self.floor = max(self.floor, kept.rank)
        return page


OPS = st.lists(
    st.tuples(
        st.sampled_from(["cold", "warm", "warm", "restore", "restore", "copy", "want"]), st.integers(0, LONGEST - 1)
    ),
    max_size=60,
)


@settings(max_examples=examples(300), deadline=None)
@given(ops=OPS)
def test_the_order_is_that_of_the_model(ops: list[tuple[str, int]]) -> None:
    pages, model = SnapshotPages(0, state(SLOTS), Lru()), Model()
    node = Node(Root(NS, 1), 0, bytes(4 * LONGEST), [bytearray(4 * LONGEST)], LONGEST)
    for what, at in ops:
        standing = sorted(model.kept)
        if what in ("cold", "warm"):
            if at in model.kept:
                continue
            gone = model.victim() if len(standing) == SLOTS else None
            slot = pages.take(1)[0]
            assert gone is None or node.page_id(0, gone) == NO_PAGE, "another one went"
            pages.publish(slot, node, at)  # type: ignore[arg-type]
            pages.drop((slot,), Retention.COLD if what == "cold" else Retention.WARM)
            model.use(at, is_cold=what == "cold", is_restored=False)
        elif standing:
            page = standing[at % len(standing)]
            slot = node.page_id(0, page)
            if what == "want":
                pages.warm(slot)
                if model.kept[page].is_cold:
                    model.use(page, is_cold=False, is_restored=False)
                continue
            pages.read((slot,))
            if what == "copy":
                pages.drop_unused(slot)
            else:
                pages.drop_restored(slot)
                model.use(page, is_cold=False, is_restored=True)
        pages.check()
        assert {place.page for place in pages.places.values()} == set(model.kept)
    assert pages.num_cold == sum(kept.is_cold for kept in model.kept.values())
    while model.kept:
        gone = model.victim()
        pages.evict(1)
        assert node.page_id(0, gone) == NO_PAGE, "another one went"


def test_a_higher_priority_outlives_what_was_restored() -> None:
    pages = SnapshotPages(0, state(8), Priority())
    low, high = (Node(Root(NS, 1), 0, bytes(4), [bytearray(4)], 1) for _ in range(2))
    high.priority = 1
    slots = pages.take(2)
    for node, slot in zip((low, high), slots, strict=True):
        pages.publish(slot, node, 0)
        pages.drop((slot,), Retention.WARM)
    pages.read(slots[:1])
    pages.drop_restored(slots[0])
    pages.evict(1)
    assert (low.page_id(0, 0), high.page_id(0, 0)) == (NO_PAGE, slots[1])


def test_a_stream_of_prompts_that_come_once_leaves_what_is_reused() -> None:
    """Ten times as many prompts as slots, longer than those that come back, with intervals and chunks."""
    worker = FakeWorker(World(), (full(4096), state(16, interval=8)), 4)
    reused = [span(start, start + 11) for start in (1000, 2000, 3000, 4000)]
    for _ in range(2):
        for prompt in reused:
            worker.run([*prompt, 7])
    for number in range(160):
        worker.run(span(10_000 + 100 * number, 10_000 + 100 * number + 60), chunk=24)
    assert [worker.world.tokens_cached([*prompt, 7]) for prompt in reused] == [12] * 4


def test_what_is_reused_ages_when_other_prefixes_take_its_place() -> None:
    """No snapshot stays for ever: prefixes that are reused now push out those that were."""
    worker = FakeWorker(World(), (full(4096), state(16)), 4)
    for start in range(1000, 9000, 1000):
        for _ in range(3):
            worker.run([*span(start, start + 11), 7])
    for number in range(40):
        worker.run(span(20_000 + 100 * number, 20_000 + 100 * number + 12))
    cached = [worker.world.tokens_cached([*span(start, start + 11), 7]) for start in range(1000, 9000, 1000)]
    assert cached == [0, 0, 0, 0, 12, 12, 12, 12], "a quarter of 16 slots, the latest ones"


def test_of_two_that_came_once_the_deeper_one_stays() -> None:
    worker = FakeWorker(World(), (full(4096), state(6)), 4)
    worker.run(span(1, 200))
    for number in range(20):
        worker.run(span(1000 + 100 * number, 1000 + 100 * number + 12))
    assert worker.world.tokens_cached(span(1, 200)) == 196
    for number in range(400):
        worker.run(span(10_000 + 100 * number, 10_000 + 100 * number + 12))
    assert worker.world.tokens_cached(span(1, 200)) == 0, "it ages all the same"
