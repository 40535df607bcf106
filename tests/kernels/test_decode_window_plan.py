"""DecodePlan for a window: each leaf that the window can touch in exactly one split, and partials that are found again.

The plan kernel runs in the interpreter or on a GPU. What the Gluon kernel does with it - where a split begins, which
number a partial has, how the last program walks over them - is integer arithmetic, run here as plain Python.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kernels.backend import Backend
from kernels.decode_attention import MAX_Q_TOKENS, DecodePlan
from kernels.decode_attention.tree_sizes import LEAF, LEAVES_PER_GROUP, TILE
from tests.examples import examples
from tests.kernels.conftest import INTERPRETING, rarely_interpreted
from tests.kernels.target import Target
from tests.kernels.test_decode_plan import HEADS, LENGTHS, PROGRAMS, Planned

GROUP = LEAF * LEAVES_PER_GROUP
PER_LEAF = LEAF // TILE
WINDOWS = (1, 64, 127, 128, 512, 513, 1024, 4096)

# Around leaves and groups, with a few keys more or less; some long, some none.
NEAR = st.builds(lambda at, more: max(at + more, 0), st.sampled_from(range(0, 9 * GROUP, LEAF)), st.integers(-9, 9))
SEQUENCES = st.lists(st.one_of(NEAR, st.integers(0, 70_000)), min_size=1, max_size=6)
WINDOW = st.one_of(st.sampled_from(WINDOWS), st.integers(1, 9000))
TOKENS = st.integers(1, MAX_Q_TOKENS)

Jitted = Callable[..., Any]


@pytest.fixture(scope="module")
def walks() -> dict[str, Jitted]:
    """The Gluon kernel's integer functions as plain Python: theirs is the text, with int for what are scalars there."""
    pytest.importorskip("triton")
    from kernels.decode_attention.hopper import merge, splits

    scalars = SimpleNamespace(maximum=max, minimum=min, where=lambda holds, a, b: a if holds else b)
    names: dict[str, Any] = {"gl": scalars}
    for name in ("origin_of", "split_of", "others_of", "lowest_key"):
        names[name] = plain(getattr(splits, name), names)
    names["first_step"] = plain(merge.first_step, names)
    names["step"] = plain(merge.step, names)
    return names


def plain(jitted: Any, names: dict[str, Any]) -> Jitted:
    function = jitted.fn
    return type(function)(function.__code__, names, function.__name__)


def planned_leaves(length: int, newest: int) -> range:
    """Of the newest keys; an empty sequence has one leaf, as it has one split."""
    return range(max(length - newest, 0) // LEAF, max(1, -(-length // LEAF)))


class Room(Planned):
    """A plan's splits, and what the buffers of a DecodePlan of its sizes hold."""

    def __init__(self, lengths: list[int], device: str, window: int, tokens: int, programs: int = PROGRAMS) -> None:
        sizes = (len(lengths), max(*lengths, 1), 2 * HEADS, HEADS, 64)
        self.own = DecodePlan(*sizes, max_q_tokens=tokens, window=window, device="cpu")
        super().__init__(lengths, device, programs=programs, planned_tokens=self.own.planned_tokens)
        pairs = len(lengths) * HEADS
        self.partials = pairs * self.own._max_groups() + (LEAVES_PER_GROUP - 1) * (self.room - pairs)

    def pairs(self) -> dict[tuple[int, int], list[list[int]]]:
        """The splits of each sequence and head, by their leaves."""
        found: dict[tuple[int, int], list[list[int]]] = {}
        for split in sorted(self.splits[: self.count]):
            found.setdefault((split[0], split[1]), []).append(split)
        return found


def check_leaves(plan: Room, lengths: list[int], newest: int) -> None:
    pairs = plan.pairs()
    assert sorted(pairs) == [(seq, head) for seq in range(len(lengths)) for head in range(HEADS)]
    for (seq, _), splits in pairs.items():
        runs = [range(first, first + leaves) for _, _, first, leaves, *_ in splits]
        assert [leaf for run in runs for leaf in run] == list(planned_leaves(lengths[seq], newest))
        assert all(len(run) > 0 for run in runs) and {split[5] for split in splits} == {len(splits)}


def stored(walks: dict[str, Jitted], split: list[int], planned: int, skipped: int) -> list[tuple[int, int]]:
    """(number, first leaf) of each partial that `attend` leaves of a split of a pair that is cut."""
    _, _, begin, held, length, splits, base, _ = split
    origin, leaves = walks["origin_of"](length, planned, LEAF), max(1, -(-length // LEAF))
    tiles = max(-(-length // TILE), 1) - origin * PER_LEAF
    spare = base + -(-leaves // LEAVES_PER_GROUP)
    spare += (walks["split_of"](begin - origin, splits, tiles, PER_LEAF) - 1) * (LEAVES_PER_GROUP - 1) - begin
    first, found = max(begin, skipped), []
    while first < begin + held:
        group = first // LEAVES_PER_GROUP
        is_alone = first > max(group * LEAVES_PER_GROUP, skipped)
        found.append((spare + first if is_alone else base + group, first))
        first = first + 1 if is_alone else min((group + 1) * LEAVES_PER_GROUP, begin + held)
    return found


def merged(walks: dict[str, Jitted], split: list[int], planned: int, skipped: int) -> list[tuple[int, int]]:
    """(number, first leaf) of each partial that the last program of a pair folds, in its order."""
    _, _, _, _, length, splits, base, _ = split
    origin, leaves = walks["origin_of"](length, planned, LEAF), max(1, -(-length // LEAF))
    tiles = max(-(-length // TILE), 1) - origin * PER_LEAF
    share = splits * PER_LEAF
    divided = max(tiles, share)
    first_alone = base + -(-leaves // LEAVES_PER_GROUP)
    pair = (base, first_alone, skipped, leaves, splits, share, divided // share, divided % share)
    walk, found = walks["first_step"](pair, origin, tiles, PER_LEAF), []
    while walk[0] < leaves:
        leaf = walk[0]
        (number, starts, exists), walk = walks["step"](walk, pair, LEAVES_PER_GROUP)
        assert exists and starts == (leaf == max(leaf // LEAVES_PER_GROUP * LEAVES_PER_GROUP, skipped))
        found.append((number, leaf))
    return found


def check_arrivals(walks: dict[str, Jitted], own: list[list[int]], skipped: int, origin: int, tiles: int) -> None:
    arriving = sum(first + leaves > skipped for _, _, first, leaves, *_ in own)
    others = walks["others_of"](skipped, origin, own[0][5], tiles, PER_LEAF, LEAVES_PER_GROUP, True)
    assert others == arriving - 1


def check_partials(walks: dict[str, Jitted], plan: Room, window: int, tokens: int) -> None:
    """Whatever tokens a sequence has, each partial is written once, in the room there is, and folded in order."""
    planned = plan.own.planned_tokens
    for new in {1, tokens}:
        taken: set[int] = set()
        for own in plan.pairs().values():
            length, splits = own[0][4], own[0][5]
            if splits == 1:
                continue
            origin = walks["origin_of"](length, planned, LEAF)
            tiles = max(-(-length // TILE), 1) - origin * PER_LEAF
            skipped = walks["lowest_key"](length - new, length, window) // LEAF
            assert skipped >= origin
            for number, (_, _, first, leaves, *_) in enumerate(own):
                inside = range(first - origin, first - origin + leaves)
                assert {walks["split_of"](leaf, splits, tiles, PER_LEAF) for leaf in inside} == {number}
            written = [partial for split in own for partial in stored(walks, split, planned, skipped)]
            assert written == merged(walks, own[0], planned, skipped)
            check_arrivals(walks, own, skipped, origin, tiles)
            numbers = {number for number, _ in written}
            assert len(numbers) == len(written) and not numbers & taken
            taken |= numbers
        assert all(0 <= number < plan.partials for number in taken)


@pytest.mark.parametrize("window", [0, 1, 128, 513, *map(rarely_interpreted, (64, 127, 512, 1024, 4096))])
@pytest.mark.parametrize("name", list(LENGTHS))
def test_what_a_window_can_touch(target: Target, walks: dict[str, Jitted], name: str, window: int) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the plan has no reference")
    lengths = LENGTHS[name]
    for programs in (PROGRAMS, 200):
        plan = Room(lengths, target.device, window, 1, programs)
        check_leaves(plan, lengths, window or max(*lengths, 1))
        check_partials(walks, plan, window, 1)


@pytest.mark.skipif(not INTERPRETING, reason="lengths are drawn in the interpreter")
@hypothesis_settings(max_examples=examples(60), deadline=None)
@given(lengths=SEQUENCES, window=WINDOW, tokens=TOKENS, programs=st.sampled_from([1, 12, 60, 264]))
def test_any_lengths_interpreter(
    walks: dict[str, Jitted], lengths: list[int], window: int, tokens: int, programs: int
) -> None:
    plan = Room(lengths, "cpu", window, tokens, programs)
    check_leaves(plan, lengths, window + tokens - 1)
    check_partials(walks, plan, window, tokens)


@pytest.mark.parametrize(
    ("window", "length", "splits"), [(128, 65_536, 1), (1024, 32_768, 2), (4096, 65_536, 8), (4096, 4096, 8)]
)
def test_a_long_sequence_is_divided_as_one_of_the_windows_length(
    target: Target, window: int, length: int, splits: int
) -> None:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the plan has no reference")
    plan = Planned([length], target.device, heads=8, programs=132, planned_tokens=window)
    assert plan.count == 8 * splits and set(plan.tiles) == {LEAF // TILE}


def test_buffers_follow_the_window() -> None:
    whole, windowed = (DecodePlan(4, 1 << 20, 8, 2, 64, window=window, device="cpu") for window in (0, 4096))
    assert whole._max_groups() == (1 << 20) // GROUP and windowed._max_groups() == 3
    # No more keys than a sequence can have: nothing to leave out.
    assert [DecodePlan(4, 4096, 8, 2, 64, window=window, device="cpu").planned_tokens for window in (4095, 4096)] == [
        4095,
        0,
    ]
    several = DecodePlan(4, 1 << 20, 8, 2, 64, max_q_tokens=8, window=4096, device="cpu")
    assert several.planned_tokens == 4103


@pytest.mark.parametrize("length", [30_000, 60_000, 61_441, 66_500])
def test_who_merges_a_pair_that_is_cut_at_groups(target: Target, walks: dict[str, Jitted], length: int) -> None:
    """And that it finds a partial for each group, whatever a window skips of the pair."""
    if target.backend is Backend.REFERENCE:
        pytest.skip("the plan has no reference")
    plan = Planned([length] + [1000] * 15, target.device, heads=8, programs=264, at_once=True)
    own = [split for split in plan.splits[: plan.count] if split[:2] == [0, 0]]
    assert own[0][5] == -len(own) < -1
    own.sort(key=lambda split: split[2])
    base, groups = own[0][6], -(-length // GROUP)
    for skipped in range(-(-length // LEAF)):
        check_arrivals(walks, own, skipped, 0, -(-length // TILE))
        written = [number for split in own for number, _ in stored(walks, split, 0, skipped)]
        assert written == list(range(base + skipped // LEAVES_PER_GROUP, base + groups))
