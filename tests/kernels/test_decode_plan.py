"""DecodePlan: every leaf of every pair in exactly one split, in order, whatever the lengths, and no split far above its
share; room is checked by name.

The plan kernel is plain Triton, so it runs in the interpreter and on a GPU; there is no torch version of it to test.
"""

from functools import cache

import pytest
import torch

from kernels.backend import Backend
from kernels.decode_attention import DecodePlan, decode_attention
from kernels.decode_attention.plan_buffers import COSTS, COSTS_AT_ONCE, MAX_ROUNDS, SPLIT_FIELDS
from kernels.decode_attention.tree_sizes import LEAF, LEAVES_PER_GROUP, TILE
from kernels.errors import KernelArgumentError
from tests.kernels.inputs import CaseShape, make_case
from tests.kernels.target import Target

HEADS = 2
PROGRAMS = 12
GROUP = LEAF * LEAVES_PER_GROUP

LENGTHS = {
    "one": [1],
    "nothing": [0],
    "padding among others": [0, 513, 0, 4096, 0],
    "around leaves": [511, 512, 513, 1024],
    "around groups": [2047, 2048, 2049, 4096],
    "ragged": [1, 9000, 17, 2048, 40000, 600],
    "many": [2048 * (1 + i % 3) for i in range(40)],
    "one very long": [1 << 20],
    "one long among short ones": [60000, *[1000] * 31],
    "whole pairs and a tail": [0, *[9000 + 700 * (i % 5) for i in range(48)], 0],
}


class Planned:
    """A plan's splits on the host."""

    def __init__(
        self,
        lengths: list[int],
        device: str,
        heads: int = HEADS,
        programs: int = PROGRAMS,
        planned_tokens: int = 0,
        at_once: bool = False,
    ) -> None:
        from kernels.decode_attention.splits_triton import launch

        self.room = len(lengths) * heads + MAX_ROUNDS * programs
        counts = {"dtype": torch.int32, "device": device}
        splits = torch.full((self.room, SPLIT_FIELDS), -1, **counts)
        launch(
            torch.tensor(lengths, **counts),
            splits,
            kv_heads=heads,
            programs=programs,
            tile=TILE,
            leaf=LEAF,
            leaves_per_group=LEAVES_PER_GROUP,
            costs=COSTS[2],
            planned_tokens=planned_tokens,
            costs_at_once=COSTS_AT_ONCE if at_once else None,
        )
        self.splits: list[list[int]] = splits.tolist()
        self.count = self.splits[0][-1]
        self.tiles = [tiles_of(*split[2:5]) for split in self.splits[: self.count]]


@cache
def planned(name: str, device: str, at_once: bool = False) -> Planned:
    """What several tests look at is planned once."""
    return Planned(LENGTHS[name], device, at_once=at_once)


def tiles_of(first: int, leaves: int, length: int) -> int:
    return -(-min(length, (first + leaves) * LEAF) // TILE) - first * LEAF // TILE


@pytest.fixture
def device(target: Target) -> str:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the plan has no reference")
    return target.device


@pytest.mark.parametrize("name", list(LENGTHS))
@pytest.mark.parametrize("at_once", [False, True])
def test_chunks_tile_all_leaves(device: str, name: str, at_once: bool) -> None:
    lengths = LENGTHS[name]
    plan = planned(name, device, at_once)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for seq, head, first, leaves, length, splits, _, _ in plan.splits[: plan.count]:
        assert length == lengths[seq] and leaves > 0
        found.setdefault((seq, head), []).append((first, leaves))
        assert len(found[seq, head]) <= abs(splits)
    assert sorted(found) == [(seq, head) for seq in range(len(lengths)) for head in range(HEADS)]
    for (seq, _), unsorted in found.items():
        runs = sorted(unsorted)
        assert [first for first, _ in runs] == [sum(leaves for _, leaves in runs[:i]) for i in range(len(runs))]
        assert sum(leaves for _, leaves in runs) == max(1, -(-lengths[seq] // LEAF))
    assert plan.count <= plan.room
    assert all(split[3] == 0 for split in plan.splits[plan.count :])
    assert {split[-1] for split in plan.splits} == {plan.count}


@pytest.mark.parametrize("name", list(LENGTHS))
@pytest.mark.parametrize("at_once", [False, True])
def test_the_longest_chunks_come_first(device: str, name: str, at_once: bool) -> None:
    plan = planned(name, device, at_once)
    tiles = [max(1, tiles) for tiles in plan.tiles]
    assert tiles == sorted(tiles, reverse=True)


@pytest.mark.parametrize("name", list(LENGTHS))
def test_parts_of_a_pair_are_equal_to_within_a_leaf(device: str, name: str) -> None:
    plan = planned(name, device)
    for split, tiles in zip(plan.splits, plan.tiles, strict=False):
        _, _, _, _, length, splits, _, _ = split
        assert abs(tiles - -(-length // TILE) / splits) <= LEAF // TILE


@pytest.mark.parametrize("name", list(LENGTHS))
@pytest.mark.parametrize("at_once", [False, True])
def test_partials_of_pairs_lie_side_by_side(device: str, name: str, at_once: bool) -> None:
    """As many as a pair has groups, and what each cut may leave alone; a whole pair has none."""
    lengths = LENGTHS[name]
    plan = planned(name, device, at_once)
    pairs = {(split[0], split[1]): tuple(split[4:7]) for split in plan.splits[: plan.count]}
    expected = 0
    for length, splits, base in sorted(pairs.values(), key=lambda pair: pair[2]):
        if abs(splits) > 1:
            assert base == expected
            expected += -(-length // GROUP) + (LEAVES_PER_GROUP - 1) * (abs(splits) - 1)
    most = len(lengths) * HEADS * -(-max(lengths) // GROUP)
    assert expected <= most + (LEAVES_PER_GROUP - 1) * (plan.room - len(lengths) * HEADS)


def test_few_leaves_are_dealt_out_one_by_one(device: str) -> None:
    assert Planned([LEAF * 5], device).tiles == [LEAF // TILE] * 5 * HEADS


@pytest.mark.parametrize("sequences", [16, 64])
@pytest.mark.parametrize("length", [2048, 4096, 8192, 32768])
def test_one_key_more_makes_no_chunk_much_longer(device: str, length: int, sequences: int) -> None:
    """A split grows by its tile or so, not by a leaf or a group."""
    before, after = (Planned([keys] * sequences, device, heads=8, programs=264) for keys in (length, length + 1))
    assert after.count == before.count and max(after.tiles) <= max(before.tiles) + 1


def test_whole_pairs_where_they_come_out_even(device: str) -> None:
    """Four pairs for each program: none is cut."""
    plan = Planned([5000] * (4 * PROGRAMS // HEADS), device)
    assert plan.count == 4 * PROGRAMS and plan.tiles == [-(-5000 // TILE)] * plan.count


def test_large_batches_of_mixed_lengths_stay_whole(device: str) -> None:
    """Eight pairs for each program, the longest first, come out even enough: cuts would cost more."""
    lengths = [1 + 8191 * i // 255 for i in range(256)]
    assert Planned(lengths, device, heads=8, programs=264).count == 256 * 8


@pytest.mark.parametrize(
    ("num_seqs", "programs", "is_placed"),
    [(1, 1, False), (2, 2, False), (10, 2, False), (11, 2, True), (24, 2, True), (25, 2, False)],
)
def test_programs_claim_places_where_a_multiprocessor_has_about_one_pair(
    num_seqs: int, programs: int, is_placed: bool
) -> None:
    plan = DecodePlan(64, 8192, 32, 8, 128, device="cpu")
    plan.multiprocessors = 132
    assert plan.programs_per_multiprocessor(num_seqs) == programs and plan.is_placed(num_seqs) == is_placed


@pytest.mark.parametrize("length", [1, 2049, 4097, 4600, 5000, 6000, 8193, 32768, 33000])
@pytest.mark.parametrize("sequences", [15, 16])
def test_whole_pairs_where_each_has_a_multiprocessor(device: str, length: int, sequences: int) -> None:
    plan = Planned([length] * sequences, device, heads=8, programs=264, at_once=True)
    assert plan.count == sequences * 8


@pytest.mark.parametrize(
    "lengths",
    [
        [1 + 8191 * i // 15 for i in range(16)],
        [30000] + [1000] * 15,
        [8000] * 8 + [500] * 8,
        [33000] * 11,
    ],
    ids=["mixed", "one long", "halves", "few"],
)
def test_up_to_a_split_for_each_program_where_pairs_differ(device: str, lengths: list[int]) -> None:
    """All begin at once, and none draws another."""
    plan = Planned(lengths, device, heads=8, programs=264, at_once=True)
    assert 132 < plan.count <= 264


@pytest.mark.parametrize("length", [30_000, 60_000, 61_440])
def test_a_long_pair_among_short_ones_is_cut_at_groups(device: str, length: int) -> None:
    """Splits are of as many groups each, but for the last; and the plan says that none has a leaf alone."""
    plan = Planned([1000] * 7 + [length] + [1000] * 8, device, heads=8, programs=264, at_once=True)
    own = [split for split in plan.splits[: plan.count] if split[0] == 7]
    for head in range(8):
        runs = sorted((first, leaves) for _, kv_head, first, leaves, *_ in own if kv_head == head)
        share = runs[0][1]
        assert share % LEAVES_PER_GROUP == 0 and len(runs) == 15
        assert [first for first, _ in runs] == list(range(0, 15 * share, share))
    assert {split[5] for split in own} == {-15}


@pytest.mark.parametrize("length", [8193, 33000])
def test_the_last_of_many_equal_pairs_are_cut(device: str, length: int) -> None:
    """An eighth of 256 sequences: 7.8 pairs for each program, of which the last are of a quarter."""
    plan = Planned([length] * 256, device, heads=8, programs=264)
    splits = [split[5] for split in plan.splits[: plan.count]]
    assert splits == [1] * (224 * 8) + [4] * (32 * 8 * 4)
    assert sorted({split[0] for split in plan.splits[224 * 8 : plan.count]}) == list(range(224, 256))


@pytest.mark.parametrize(
    "lengths", [[33000] * 64, [4096] * 256, [9000] * 128 + [3000] * 128], ids=["few", "short", "of two lengths"]
)
def test_no_tail_where_it_would_cost_more(device: str, lengths: list[int]) -> None:
    plan = Planned(lengths, device, heads=8, programs=264)
    assert plan.count == 8 * len(lengths)


def test_a_long_sequence_is_shared_by_all_programs(device: str) -> None:
    plan = planned("one long among short ones", device)
    assert max(plan.tiles) <= 2 * sum(plan.tiles) / PROGRAMS


def test_no_more_chunks_than_there_is_room_for(device: str) -> None:
    plan = Planned([LEAF * 400] * 7, device)
    assert plan.count <= plan.room


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seqs": 0}, "max_seqs: must be positive, got 0"),
        ({"max_q_tokens": 0}, "max_q_tokens: must be positive, got 0"),
        ({"q_heads": 3}, "q_heads: 3 are not a multiple of 2 kv heads"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must not be negative, got -1"),
    ],
)
def test_sizes_are_checked(change: dict[str, int], message: str) -> None:
    sizes = {"max_seqs": 2, "max_seqlen_k": 64, "q_heads": 4, "kv_heads": 2, "dim": 64}
    with pytest.raises(KernelArgumentError, match=message):
        DecodePlan(**(sizes | change), device="cpu")


def test_a_plan_for_a_window_serves_that_window(target: Target) -> None:
    case = make_case([(40, 1)], CaseShape(device=target.device))

    def run(planned: int, window: int) -> torch.Tensor:
        plan = DecodePlan(1, 64, 4, 2, 64, window=planned, device=target.device)
        plan.prepare(case.seqlens_k)
        where = (case.k_pages, case.v_pages, case.block_tables, case.seqlens_k)
        return decode_attention(
            case.q, *where, max_seqlen_k=48, window=window, plan=plan, backend=target.backend
        )  # fmt: skip

    assert torch.equal(run(20, 20), run(0, 20))
    for planned, window in ((20, 0), (20, 19), (100, 0)):
        with pytest.raises(KernelArgumentError, match=f"plan: made for window {planned}, got {window}"):
            run(planned, window)
    with pytest.raises(KernelArgumentError, match="window: must not be negative, got -1"):
        run(-1, 0)


def test_a_call_must_fit_its_plan(target: Target) -> None:
    case = make_case([(40, 1), (3, 1)], CaseShape(device=target.device))
    seqlens = case.seqlens_k

    def run(plan: DecodePlan) -> torch.Tensor:
        tables = case.block_tables
        plan.prepare(seqlens)
        return decode_attention(
            case.q, case.k_pages, case.v_pages, tables, seqlens, max_seqlen_k=48, plan=plan, backend=target.backend
        )

    def plan(max_seqs: int = 2, max_seqlen_k: int = 64, dim: int = 64) -> DecodePlan:
        return DecodePlan(max_seqs, max_seqlen_k, 4, 2, dim, device=target.device)

    assert run(plan()).shape == case.q.shape
    for bad, message in (
        (plan(max_seqlen_k=47), "plan: made for max_seqlen_k up to 47, got 48"),
        (plan(dim=128), r"plan: made for \(q_heads, kv_heads, dim\) \(4, 2, 128\), got \(4, 2, 64\)"),
        (plan(max_seqs=1), "seqlens_k: the plan has room for 1 sequences, got 2"),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            run(bad)
    with pytest.raises(KernelArgumentError, match="seqlens_k: dtype must be"):
        plan().prepare(seqlens.long())
