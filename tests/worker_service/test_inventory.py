"""The store of what pages hold, against a dict that keeps each page's whole chain; and the room that it takes."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from session.limits import SessionLimits
from session.messages import CachedRun
from session.words import GroupKind, GroupSpec, Namespace
from tests.examples import examples
from worker_service.core.inventory import Inventory, Written
from worker_service.core.limits import MessageBudget
from worker_service.core.restoration import LOOKS, PART, Restoration, _in_order

PAGE = 2
NUM_PAGES = 7
GROUPS = (
    GroupSpec("full", GroupKind.FULL, NUM_PAGES),
    GroupSpec("window", GroupKind.WINDOW, NUM_PAGES, 0, 3),
    GroupSpec("state", GroupKind.STATE, NUM_PAGES),
    GroupSpec("second", GroupKind.FULL, NUM_PAGES),
)
NAMESPACES = [Namespace("model"), Namespace("model", salt="tenant")]
PAGE_IDS = st.integers(1, NUM_PAGES)
Chain = tuple[Namespace, tuple[int, ...]]


class InventoryMachine(RuleBasedStateMachine):
    """`truth` has what each (group, page) holds: as the device would know, whatever the store remembers of it.

    Pages are written as launches do: what a page held is forgotten first, then its new content is recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inventory = Inventory(GROUPS, PAGE)
        self.truth: dict[tuple[int, int], Chain] = {}

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        tokens=st.lists(st.integers(0, 1), min_size=PAGE, max_size=4 * PAGE),
        page_ids=st.lists(st.lists(PAGE_IDS, min_size=4, max_size=4, unique=True), min_size=4, max_size=4),
        slot=PAGE_IDS,
        holes=st.integers(0, 4),
        in_two=st.booleans(),
    )
    def write(
        self,
        namespace: Namespace,
        tokens: list[int],
        page_ids: list[list[int]],
        slot: int,
        holes: int,
        in_two: bool,
    ) -> None:
        """A sequence computes a prompt in one or two parts, in pages that were granted for writing."""
        end = len(tokens) // PAGE
        tables = [array("i", row[:end]) for row in page_ids]
        tables[1][: min(holes, end)] = array("i", [0] * min(holes, end))
        tables[2] = array("i")
        for group, table in enumerate(tables):
            self.grant(group, [page_id for page_id in table if page_id])
        self.grant(2, [slot])
        for group, table in enumerate(tables):
            for page, page_id in enumerate(table):
                if page_id:
                    self.truth[group, page_id] = namespace, tuple(tokens[: (page + 1) * PAGE])
        self.truth[2, slot] = namespace, tuple(tokens[: end * PAGE])
        middle = end // 2 if in_two else 0
        packed = array("i", tokens)
        if middle:
            self.inventory.record(Written(namespace, packed, tables, 0, 0, middle))
        base = max(middle - 1, 0)
        rest = [table[base:] for table in tables]
        self.inventory.record(Written(namespace, packed, rest, base, middle, end, ((2, slot, end - 1),)))

    @rule(group=st.integers(0, 3), page_ids=st.lists(PAGE_IDS, max_size=3))
    def grant(self, group: int, page_ids: list[int]) -> None:
        self.inventory.forget_pages(group, page_ids)
        for page_id in page_ids:
            self.truth.pop((group, page_id), None)

    @rule(page_ids=st.lists(PAGE_IDS, max_size=3))
    def use(self, page_ids: list[int]) -> None:
        self.inventory.use(page_ids)

    @rule(namespaces=st.sampled_from([None, [], NAMESPACES[:1], NAMESPACES[1:], [Namespace("unknown")]]))
    def forget(self, namespaces: list[Namespace] | None) -> None:
        self.inventory.forget(namespaces)
        for place, (namespace, _) in list(self.truth.items()):
            if namespaces is None or namespace in namespaces:
                del self.truth[place]

    @rule(seed=st.integers(0, 2**16), kills=st.lists(PAGE_IDS, max_size=2), size=st.sampled_from([4, 8, 40]))
    def offer(self, seed: int, kills: list[int], size: int) -> None:
        """What is offered is true at the time when it is offered, each run behind its parent, no page twice."""
        restoration = Restoration(self.inventory, GROUPS)
        restoration.begin()
        chains: dict[int, Chain] = {}
        seen: set[tuple[int, int]] = set()
        is_first = True
        while restoration.is_pending:
            found = restoration.take(MessageBudget(3, SessionLimits().max_message_bytes), size)
            assert found is not None
            assert sum(len(ids) // 4 for run in found.runs for ids in run.page_ids) <= size  # type: ignore[union-attr]
            for run in found.runs:
                assert isinstance(run, CachedRun)
                self.check_run(run, chains, seen)
            if is_first:
                self.grant(seed % 4, kills)
                is_first = False

    def check_run(self, run: CachedRun, chains: dict[int, Chain], seen: set[tuple[int, int]]) -> None:
        assert (run.namespace is None) == bool(run.parent_run)
        namespace, before = chains[run.parent_run] if run.parent_run else (run.namespace, ())
        assert namespace is not None
        tokens = before + tuple(array("i", run.tokens))
        chains[run.run] = namespace, tokens
        for group, packed in enumerate(run.page_ids):
            ids = array("I", packed)
            assert len(ids) == len(run.tokens) // 4 // PAGE
            assert group in (1, 2) or all(ids)
            for page, page_id in enumerate(ids, len(before) // PAGE):
                if page_id:
                    assert self.truth[group, page_id] == (namespace, tokens[: (page + 1) * PAGE])
                    assert (group, page_id) not in seen
                    seen.add((group, page_id))

    @invariant()
    def counts_agree(self) -> None:
        inventory = self.inventory
        alive = [page_id for page_id, stamp in enumerate(inventory.stamps) if stamp]
        assert inventory.num_pages == len(alive)
        assert {inventory.namespace(page_id) for page_id in alive} == set(inventory._number_of)


TestInventoryMachine = InventoryMachine.TestCase
TestInventoryMachine.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def test_everything_that_was_written_and_not_granted_since_is_offered() -> None:
    inventory = Inventory(GROUPS[:1], PAGE)
    tokens = array("i", range(12))
    inventory.record(Written(NAMESPACES[0], tokens, [array("i", [1, 2, 3, 4, 5, 6])], 0, 0, 6))
    inventory.record(Written(NAMESPACES[0], array("i", [0, 1, 7, 7]), [array("i", [1, 7])], 0, 1, 2))
    restoration = Restoration(inventory, GROUPS[:1])
    restoration.begin()
    found = restoration.take(MessageBudget(9, 1 << 20), 100)
    assert found is not None and found.is_complete
    runs = [(run.parent_run, list(array("I", run.page_ids[0]))) for run in found.runs if isinstance(run, CachedRun)]
    assert runs == [(0, [1]), (1, [2, 3, 4, 5, 6]), (1, [7])]


@pytest.mark.parametrize("num_keys", [1, 40, 1 << 40])
@pytest.mark.parametrize("num_items", [0, 1, PART, 20 * PART])
def test_sorting_in_parts_does_what_sorted_does(num_items: int, num_keys: int) -> None:
    rng = random.Random(num_items)
    keys = [rng.randrange(num_keys) for _ in range(num_items)]
    sorting = _in_order(list(range(num_items)), keys.__getitem__)
    looks = []
    try:
        while True:
            looks.append(next(sorting))
    except StopIteration as ended:
        assert ended.value == sorted(range(num_items), key=keys.__getitem__)
    if num_keys > num_items:
        assert max(looks, default=0) * LOOKS < 2 * PART


def test_the_room_for_a_page_is_what_the_module_says() -> None:
    num_pages, page_tokens = 1_000, 16
    groups = (GroupSpec("full", GroupKind.FULL, num_pages), GroupSpec("window", GroupKind.WINDOW, num_pages, 0, 4))
    inventory = Inventory(groups, page_tokens)
    leading = (
        inventory.stamps,
        inventory.parents,
        inventory.parent_stamps,
        inventory.used,
        inventory.tokens,
        inventory._name_of,
    )
    other = (inventory.leads[1], inventory.lead_stamps[1])
    assert sum(len(part) * part.itemsize for part in leading) == (num_pages + 1) * (32 + 4 * page_tokens)
    assert sum(len(part) * part.itemsize for part in other) == (num_pages + 1) * 12
