"""The plans of latent attention, made on the device: every part of the work once, the longest first."""

import heapq
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.mla_decode import MlaDecodePlan
from kernels.mla_decode.cut_sizes import LONGER, MANY_PARTS, MOST_MERGED
from kernels.mla_decode.tree_sizes import MOST_HEADS_TRANSPOSED, TILE, tree_of
from kernels.mla_prefill import BLOCK, MlaPrefillPlan
from tests.examples import examples
from tests.kernels.conftest import rarely_interpreted
from tests.kernels.inputs import running_sums
from tests.kernels.target import Target
from tests.kernels.test_decode_window_plan import Jitted, plain

LENGTHS = [9217, 0, 3, 1024, 2055]
QUERIES = [1, 2, 1, 4, 3]


def planner(target: Target) -> str:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the references need no plan")
    return target.device


def leaf_of(length: int, heads: int, several: bool = False) -> int:
    """Returns how many latents the leaves of a sequence have, as Tree says: whole tiles, of many heads in pairs."""
    tree = tree_of(heads, not several)
    if tree.short is None:
        return tree.leaf
    tiles, leaves = max(-(-length // TILE), 1), tree.most_leaves(length)
    unit = 1 if heads <= MOST_HEADS_TRANSPOSED else 2
    return -(-tiles // (unit * leaves)) * unit * TILE


def leaves_of(length: int, heads: int, several: bool = False) -> int:
    return max(-(-length // leaf_of(length, heads, several)), 1)


def sizes_of(plan: MlaDecodePlan) -> list[int]:
    """Tiles of 64 latents of each item, in order."""
    sizes = []
    for *_, leaf, leaves, length, _ in plan.items[: int(plan.counts[0])].tolist():
        latents = leaf_of(length, plan.heads, not plan.one_query)
        sizes.append(max(1, -(-min(leaves * latents, length - leaf * latents) // TILE)))
    return sizes


def busiest_of(sizes: list[int], programs: int) -> int:
    """Returns the most tiles of a program, where each takes the next item when it has done its own."""
    busy = [0] * programs
    for size in sizes:
        heapq.heapreplace(busy, busy[0] + size)
    return max(busy)


@pytest.fixture(scope="module")
def leaf_tiles() -> Jitted:
    """The Gluon kernels' function as plain Python."""
    pytest.importorskip("triton")
    from kernels.mla_decode.hopper import leaves

    scalars = SimpleNamespace(where=lambda holds, a, b: a if holds else b)
    return plain(leaves.leaf_tiles, {"gl": scalars, "SHORT_LEAVES": leaves.SHORT_LEAVES.value})


@hypothesis_settings(max_examples=examples(200), deadline=None)
@given(
    length=st.one_of(
        st.integers(1, 200_000), st.builds(lambda n, by: n * 1024 + by, st.integers(1, 64), st.integers(-1, 1))
    ),
    heads=st.sampled_from((8, 64, 128)),
)
def test_leaves_are_as_many_as_a_power_of_two_says(length: int, heads: int, leaf_tiles: Jitted) -> None:
    tree = tree_of(heads, one_query=True)
    tiles = leaf_tiles(length, tree.leaf, tree.short, TILE, heads > MOST_HEADS_TRANSPOSED)
    assert tiles * TILE == leaf_of(length, heads) <= tree.leaf
    most = tree.most_leaves(length)
    assert leaves_of(length, heads) <= most <= tree.most_leaves(length + 1) and most.bit_count() == 1
    # No leaf but a lone one is shorter than half of what it may be.
    assert most == 1 or tiles >= tree.short // TILE // 2
    assert leaf_tiles(length, 1024, 0, TILE, True) == 16


@pytest.mark.parametrize("programs", [1, 4, 12, 500])
@pytest.mark.parametrize(("heads", "several"), [(16, False), (16, True), (128, True)])
def test_decode_attends_to_every_leaf_of_every_tile_once(
    target: Target, heads: int, several: bool, programs: int
) -> None:
    device = planner(target)
    queries = QUERIES if several else [1] * len(LENGTHS)
    plan = MlaDecodePlan(5, max(LENGTHS), heads, max_q_tokens=4 if several else None, programs=programs, device=device)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    plan.prepare(lengths, running_sums(queries, device) if several else None)
    count, step, sharing, _ = plan.counts.tolist()
    shared = {start: (queries, parts, slot) for start, queries, parts, slot in plan.shared[:sharing].tolist()}
    leaves = [leaves_of(length, heads, several) for length in LENGTHS]
    done, slots = [], []
    for seq, q_start, q_len, tile, leaf, held, length, slot in plan.items[:count].tolist():
        assert (q_start, q_len, length) == (sum(queries[:seq]), queries[seq], LENGTHS[seq])
        done += [(seq, tile, leaf + i) for i in range(held)]
        slots += [slot] if slot >= 0 else []
        assert slot < 0 or (leaf % step == 0 and held == min(step, leaves[seq] - leaf))
        # A shared-out tile's slots follow each other: that is where the fold looks.
        parts = -(-leaves[seq] // step)
        if q_start in shared:
            assert shared[q_start][:2] == (q_len, parts) and slot == shared[q_start][2] + tile * parts + leaf // step
        else:
            assert slot == -1
    wanted = [
        (seq, tile, leaf)
        for seq, new in enumerate(queries)
        for tile in range(-(-new * heads // plan.rows))
        for leaf in range(leaves[seq])
    ]
    assert sorted(done) == wanted
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= plan.acc.shape[0]
    assert sizes_of(plan) == sorted(sizes_of(plan), reverse=True)
    # One program has no one to share with; of 500 most would have nothing to do.
    assert bool(slots) == (programs > 1) or programs == 4


@pytest.mark.parametrize(("heads", "lengths"), [(128, [9217]), (128, [0]), (20, [2055, 1024]), (64, [3, 10240])])
def test_every_item_is_a_leaf_where_weights_have_a_launch_of_their_own(
    target: Target, heads: int, lengths: list[int]
) -> None:
    """And the tiles of a leaf follow each other: the first launch takes them together."""
    device = planner(target)
    plan = MlaDecodePlan(len(lengths), max(*lengths, 1), heads, programs=132, device=device)
    assert plan.has_weights_apart(len(lengths)) and not plan.has_weights_apart(len(lengths) + 1)
    plan.prepare(torch.tensor(lengths, dtype=torch.int32, device=device))
    items = plan.items[: int(plan.counts[0])].tolist()
    assert all(leaves == 1 for *_, leaves, _, _ in items)
    tiles = -(-heads // 64)
    groups = [items[first : first + tiles] for first in range(0, len(items), tiles)]
    assert all([item[3] for item in group] == list(range(tiles)) for group in groups)
    assert all(len({(item[0], item[4]) for item in group}) == 1 for group in groups)
    leaves = {(seq, leaf) for seq, length in enumerate(lengths) for leaf in range(leaves_of(length, heads))}
    assert {(group[0][0], group[0][4]) for group in groups} == leaves and len(groups) == len(leaves)
    slots = [item[7] for item in items if item[7] >= 0]
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= plan.acc.shape[0]
    assert len(items) * plan.tree.leaf <= plan.weights.shape[0] == plan.tops.shape[0] == plan.tile_sums.shape[0]


@pytest.mark.parametrize(
    ("heads", "longest", "options", "most"),
    [
        (128, 8192, {}, 2),
        (128, 20480, {}, 1),
        (128, 20481, {}, 0),
        (128, 2048, {}, 8),
        (64, 8192, {}, 4),
        (64, 8192, {"programs": 1}, 1),
        (64, 8192, {"max_q_tokens": 2}, 0),
        (64, 8192, {"by_load": True}, 0),
        (16, 8192, {}, 0),
        (192, 1024, {}, 0),
    ],
)
def test_weights_have_a_launch_of_their_own_where_leaves_are_few(
    heads: int, longest: int, options: dict[str, object], most: int
) -> None:
    plan = MlaDecodePlan(8, longest, heads, device="cpu", **{"programs": 132, **options})
    assert [plan.has_weights_apart(num_seqs) for num_seqs in range(9)] == [0 < num <= most for num in range(9)]


def test_decode_shares_out_whole_groups_where_that_keeps_the_programs_busy(target: Target) -> None:
    device = planner(target)
    for sequences, step in ((8, 8), (5, 1)):
        plan = MlaDecodePlan(8, 8192, 16, programs=16, device=device)
        plan.prepare(torch.full((sequences,), 8192, dtype=torch.int32, device=device))
        assert plan.counts.tolist() == [sequences * 16 // step, step, sequences, 8]


@pytest.mark.parametrize(
    ("sequences", "length", "step"), [(8, 8192, 1), (16, 8192, 2), (32, 8192, 4), (2, 131072, 4), (16, 65536, 8)]
)
def test_many_heads_share_out_as_many_leaves_as_keep_the_programs_busy(
    target: Target, sequences: int, length: int, step: int
) -> None:
    device = planner(target)
    plan = MlaDecodePlan(sequences, length, 128, programs=132, device=device)
    plan.prepare(torch.full((sequences,), length, dtype=torch.int32, device=device))
    assert plan.counts.tolist() == [sequences * 2 * (length // 1024) // step, step, sequences, 16]


@pytest.mark.parametrize("length", [1024, 4096, 8192])
@pytest.mark.parametrize(
    ("heads", "sequences"), [(16, 16), rarely_interpreted(16, 64), (128, 16), rarely_interpreted(128, 64)]
)
def test_one_latent_more_makes_no_program_much_busier(target: Target, heads: int, sequences: int, length: int) -> None:
    """The rest of a sequence is not taken for a leaf or a group, and leaves grow by two tiles at most."""
    device, busiest, steps = planner(target), [], []
    for latents in (length, length + 1):
        plan = MlaDecodePlan(sequences, length + 1, heads, programs=132, device=device)
        plan.prepare(torch.full((sequences,), latents, dtype=torch.int32, device=device))
        busiest.append(busiest_of(sizes_of(plan), 132))
        # Where nothing is shared out there is no step.
        steps += [int(plan.counts[1])] if int(plan.counts[2]) else []
    assert len(set(steps)) <= 1 and busiest[1] <= busiest[0] + max(busiest[0] // 8, 2)


def merges(plan: MlaDecodePlan, parts_of: dict[int, list[int]]) -> bool:
    return plan.transposed and max(map(len, parts_of.values()), default=0) <= MOST_MERGED


def assert_pieces_cover(plan: MlaDecodePlan, parts_of: dict[int, list[int]], listed: int) -> None:
    """Every row of a tile that is cut is in one piece, of all of the tile's parts; tiles of many have four pieces.

    None where heads are few and no tile has many: then its first part's program merges the others.
    """
    if merges(plan, parts_of):
        assert listed == 0
        return
    rows_left = {first_row: set(range(plan.slot_rows)) for first_row in parts_of}
    for first_row, rows, parts, part_row in plan.shared[:listed].tolist():
        offset = part_row % plan.slot_rows
        slot = part_row // plan.slot_rows
        assert parts_of[first_row - offset] == list(range(slot, slot + parts)) and rows <= plan.rows
        rows_left[first_row - offset] -= set(range(offset, offset + rows))
        assert not (plan.transposed and parts >= MANY_PARTS) or rows <= -(-plan.slot_rows // 8) * 2
    queries = plan.heads * plan.max_q_tokens
    assert all(row >= queries % plan.rows > 0 for left in rows_left.values() for row in left)


@pytest.mark.parametrize("programs", [1, 4, rarely_interpreted(12), 132])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, rarely_interpreted([8192] * 5), [1, 64, 65, 128, 129], [0] * 5, [40000, 5, 5, 5, 5]]
)
@pytest.mark.parametrize(("heads", "several"), [(16, False), rarely_interpreted(20, False), (48, False), (128, True)])
def test_cuts_by_load_cover_every_tile_once_in_order(
    target: Target, heads: int, several: bool, lengths: list[int], programs: int
) -> None:
    """And no program gets much more than its part; every cut tile has its parts in slots that follow each other."""
    device = planner(target)
    queries = QUERIES if several else [1] * 5
    most = max(QUERIES) if several else None
    plan = MlaDecodePlan(5, max(*lengths, 1), heads, max_q_tokens=most, by_load=True, programs=programs, device=device)
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan.prepare(given, running_sums(queries, device) if several else None)
    count, run, cut, _ = plan.counts.tolist()
    firsts, items = plan.firsts.tolist(), plan.items[: int(plan.counts[0])].tolist()
    assert firsts[0] == 0 and firsts[-1] == count <= plan.max_items and firsts == sorted(firsts)
    done, slots, merged = [], [], []
    parts_of: dict[int, list[int]] = {}
    for seq, q_start, q_len, tile, first, stop, length, slot in items:
        if plan.transposed:
            merged.append((slot, q_len, tile))
            q_len, tile = 1, 0
        assert (q_start, q_len, length) == (sum(queries[:seq]), queries[seq], lengths[seq])
        assert first % 64 == 0 and (stop == length or stop % 64 == 0) and (first < stop or length == 0)
        done += [(seq, tile, key) for key in range(first // 64, max(-(-stop // 64), 1))]
        if slot >= 0:
            slots.append(slot)
            parts_of.setdefault(q_start * heads + tile * plan.rows, []).append(slot)
    units = [(seq, tile) for seq in range(5) for tile in range(-(-queries[seq] * heads // plan.rows))]
    tiles_of = [max(-(-length // 64), 1) for length in lengths]
    assert done == [(seq, tile, key) for seq, tile in units for key in range(tiles_of[seq])]
    assert slots == list(range(len(slots))) and len(slots) <= plan.parts.shape[0] and cut <= plan.shared.shape[0]
    assert_pieces_cover(plan, parts_of, cut)
    counts = {slots[0]: len(slots) for slots in parts_of.values()}
    for slot, others, part in merged:
        count = counts.get(slot - part, 1)
        wanted = (count - 1 if part == 0 else -1) if count > 1 and merges(plan, parts_of) else 0
        assert 0 <= part < count and others == wanted
    sizes = [max(1, -(-(stop - first) // 64)) for *_, first, stop, _, _ in items]
    # What starting and ending a unit costs, in tiles.
    extra = 4 if plan.rows == 64 else 3
    busy = [sum(sizes[first:last]) + extra * (last - first) for first, last in pairwise(firsts)]
    share = max(-(-sum(tiles_of[seq] + extra for seq, _ in units) // programs), 2)
    assert max(busy) <= share + share // 16 + 2 * extra
    assert max(busy) <= run + 2 * extra


@pytest.mark.parametrize(
    ("shortest", "sequences", "heads", "parts"), [(8192, 64, 64, 2), (7900, 64, 64, 2), (4097, 16, 128, 4)]
)
def test_sequences_of_about_one_length_have_equally_many_parts(
    target: Target, shortest: int, sequences: int, heads: int, parts: int
) -> None:
    """And each part a program of its own: 128 parts of 64 sequences with 64 heads, where equal loads make 196."""
    device = planner(target)
    plan = MlaDecodePlan(sequences, 8192, heads, by_load=True, programs=132, device=device)
    lengths = [shortest + 64 * (seq % 4) if shortest == 7900 else shortest for seq in range(sequences)]
    plan.prepare(torch.tensor(lengths, dtype=torch.int32, device=device))
    count, _, cut, _ = plan.counts.tolist()
    units = sequences * heads // 64
    assert (count, cut) == (units * parts, units)
    assert {row[2] for row in plan.shared[:cut].tolist()} == {parts}
    assert all(stop - start <= 1 for start, stop in pairwise(plan.firsts.tolist()))


@pytest.mark.parametrize("heads", [8, 32])
def test_first_of_two_parts_is_longer(target: Target, heads: int) -> None:
    """Its program merges the other; no program waits for all."""
    device = planner(target)
    plan = MlaDecodePlan(64, 8192, heads, by_load=True, programs=132, device=device)
    plan.prepare(torch.full((64,), 8192, dtype=torch.int32, device=device))
    count, _, listed, _ = plan.counts.tolist()
    items = plan.items[:count].tolist()
    assert count == 128 and listed == 0
    assert [stop - first for *_, first, stop, _, _ in items] == [64 * (64 + LONGER), 64 * (64 - LONGER)] * 64
    assert [item[2:4] for item in items] == [[1, 0], [-1, 1]] * 64


@pytest.mark.parametrize(
    ("heads", "sequences", "several", "together"),
    [(64, 8, False, True), (64, 7, False, False), (128, 3, False, False), (32, 4, True, True), (32, 1, False, True)],
)
def test_programs_fold_together_where_tiles_are_many(heads: int, sequences: int, several: bool, together: bool) -> None:
    """From 8 tiles of rows on, however many the plan holds, and wherever heads are few."""
    most = 4 if several else None
    for by_load in (False, True):
        plan = MlaDecodePlan(100, 64, heads, max_q_tokens=most, by_load=by_load, programs=132, device="cpu")
        assert plan.folds_together(sequences) == (by_load and together)


@pytest.mark.parametrize(
    ("heads", "several", "rows"), [(8, False, 16), (16, False, 16), (20, False, 32), (33, False, 64), (20, True, 64)]
)
def test_tiles_that_are_cut_by_load_have_no_more_rows_than_heads_need(heads: int, several: bool, rows: int) -> None:
    plan = MlaDecodePlan(5, 64, heads, max_q_tokens=4 if several else None, by_load=True, programs=12, device="cpu")
    assert plan.rows == rows and plan.slot_rows == min(rows, heads * plan.max_q_tokens)


def test_several_queries_of_few_heads_keep_their_plan_where_cuts_are_by_load(target: Target) -> None:
    device = planner(target)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    lists = []
    for by_load in (False, True):
        plan = MlaDecodePlan(
            5, max(LENGTHS), 16, max_q_tokens=max(QUERIES), by_load=by_load, programs=12, device=device
        )
        plan.prepare(lengths, running_sums(QUERIES, device))
        assert not plan.by_load
        lists.append((plan.items, plan.counts, plan.shared))
    for with_load, without in zip(*lists, strict=True):
        assert torch.equal(with_load, without)


@pytest.mark.parametrize("mode", ["aligned", "offsets", "all"])
def test_prefill_orders_every_tile_by_its_keys(target: Target, mode: str) -> None:
    device = planner(target)
    new, keys, offsets = [300, 0, 1, 129, 128], [700, 50, 1, 129, 900], [400, 9, -1, 0, 0]
    plan = MlaPrefillPlan(5, 600, device=device)
    given = torch.tensor(offsets, dtype=torch.int32, device=device) if mode == "offsets" else None
    plan.prepare(running_sums(new, device), running_sums(keys, device), given, causal=mode != "all")
    tiles = [(seq, tile) for seq, count in enumerate(new) for tile in range(-(-count // BLOCK))]

    def seen(seq: int, tile: int) -> int:
        offset = {"aligned": keys[seq] - new[seq], "offsets": offsets[seq], "all": keys[seq]}[mode]
        return max(min(keys[seq], offset + min(new[seq], (tile + 1) * BLOCK)), 0)

    order = [tuple(pair) for pair in plan.order[: int(plan.counts[0])].tolist()]
    assert order == sorted(tiles, key=lambda pair: -seen(*pair))
    assert plan.counts[1:].tolist() == [0, 0]


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(KernelArgumentError, match="max_seqs: must be in"):
        MlaPrefillPlan(1025, 10, device="cpu")
    with pytest.raises(KernelArgumentError, match="cu_seqlens_q: the plan holds 1"):
        MlaPrefillPlan(1, 10, device="cpu").prepare(running_sums([1, 2]), running_sums([1, 2]))


@pytest.mark.parametrize("by_load", [False, True])
def test_what_a_decode_plan_does_not_hold_is_refused_by_name(by_load: bool) -> None:
    plan = MlaDecodePlan(1, 10, 32, by_load=by_load, programs=4, device="cpu")
    with pytest.raises(KernelArgumentError, match="seqlens_k: the plan holds 1"):
        plan.prepare(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(KernelArgumentError, match="plan: holds"):
        plan.check(1, 11, 32, None)
    with pytest.raises(KernelArgumentError, match="plan: made for 32 heads"):
        plan.check(1, 10, 128, None)
    with pytest.raises(KernelArgumentError, match="plan: made for calls without cu_seqlens_q"):
        plan.check(1, 10, 32, 1)
