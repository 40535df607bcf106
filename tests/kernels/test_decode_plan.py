"""DecodePlan: every unit of work in exactly one chunk, in order, whatever the lengths; room is checked by name.

The plan kernel is plain Triton, so it runs in the interpreter and on a GPU; there is no torch version of it to test.
"""

import pytest
import torch

from kernels.backend import Backend
from kernels.decode_attention import DecodePlan, decode_attention
from kernels.decode_attention.plan import CHUNK_FIELDS, LEAF, LEAVES_PER_GROUP, WAVES
from kernels.errors import KernelArgumentError
from tests.kernels.inputs import CaseShape, make_case
from tests.kernels.target import Target

HEADS = 2
PROGRAMS = 12
MAX_CHUNKS = 2 * WAVES * PROGRAMS

LENGTHS = {
    "one": [1],
    "nothing": [0],
    "padding among others": [0, 513, 0, 4096, 0],
    "around leaves": [511, 512, 513, 1024],
    "around groups": [2047, 2048, 2049, 4096],
    "ragged": [1, 9000, 17, 2048, 40000, 600],
    "many": [2048 * (1 + i % 3) for i in range(40)],
    "one very long": [1 << 20],
}


class Planned:
    """A plan's tensors on the host."""

    def __init__(self, lengths: list[int], device: str) -> None:
        from kernels.decode_attention.plan_triton import launch

        counts = {"dtype": torch.int32, "device": device}
        bases = torch.full((len(lengths) + 1,), -1, **counts)
        chunks = torch.full((MAX_CHUNKS * CHUNK_FIELDS,), -1, **counts)
        launch(
            torch.tensor(lengths, **counts),
            bases,
            chunks,
            kv_heads=HEADS,
            programs=PROGRAMS,
            leaf=LEAF,
            leaves_per_group=LEAVES_PER_GROUP,
            waves=WAVES,
        )
        self.bases: list[int] = bases.tolist()
        self.chunks: list[list[int]] = chunks.view(-1, CHUNK_FIELDS).tolist()
        self.count, self.unit, self.per = self.chunks[0][5:]
        self.sizes = [chunk[3] for chunk in self.chunks[: self.count]]


def units_of(length: int, unit: int) -> int:
    return max(1, -(-length // (LEAF * unit)))


@pytest.fixture
def device(target: Target) -> str:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the plan has no reference")
    return target.device


@pytest.mark.parametrize("name", list(LENGTHS))
def test_chunks_tile_all_units(device: str, name: str) -> None:
    lengths = LENGTHS[name]
    plan = Planned(lengths, device)
    assert plan.unit in (1, LEAVES_PER_GROUP)
    units = [
        (seq, head, unit)
        for seq, length in enumerate(lengths)
        for head in range(HEADS)
        for unit in range(units_of(length, plan.unit))
    ]
    assert plan.count == -(-len(units) // plan.per) <= MAX_CHUNKS
    for number, (*place, count, length, _, _, _) in enumerate(plan.chunks[: plan.count]):
        first = number * plan.per
        assert tuple(place) == units[first] and length == lengths[place[0]]
        assert count == min(plan.per, len(units) - first)
    assert all(chunk[3] == 0 for chunk in plan.chunks[plan.count :])
    assert {tuple(chunk[5:]) for chunk in plan.chunks} == {(plan.count, plan.unit, plan.per)}


@pytest.mark.parametrize("name", list(LENGTHS))
def test_bases_count_units(device: str, name: str) -> None:
    plan = Planned(LENGTHS[name], device)
    counts = [units_of(length, plan.unit) for length in LENGTHS[name]]
    assert plan.bases == [*(sum(counts[:seq]) for seq in range(len(counts))), -1]


def test_few_leaves_are_dealt_out_one_by_one(device: str) -> None:
    plan = Planned([LEAF * 5], device)
    assert plan.unit == 1 and plan.sizes == [1] * 5 * HEADS


def test_leaves_where_groups_are_too_few(device: str) -> None:
    """Up to seven eighths of the programs: then no program gets more leaves than its share."""
    plan = Planned([LEAF * LEAVES_PER_GROUP * (PROGRAMS // HEADS - 1)], device)
    assert plan.unit == 1 and max(plan.sizes) == -(-sum(plan.sizes) // PROGRAMS)


def test_as_many_groups_as_programs_stay_whole(device: str) -> None:
    plan = Planned([LEAF * LEAVES_PER_GROUP * PROGRAMS // HEADS], device)
    assert plan.unit == LEAVES_PER_GROUP and plan.sizes == [1] * PROGRAMS


def test_much_work_is_drawn_in_several_chunks_for_each_program(device: str) -> None:
    plan = Planned([LEAF * LEAVES_PER_GROUP * 50 * PROGRAMS // HEADS], device)
    assert plan.unit == LEAVES_PER_GROUP and (WAVES - 1) * PROGRAMS < plan.count <= WAVES * PROGRAMS


def test_two_groups_at_a_time_where_that_takes_no_longer(device: str) -> None:
    """Pairs of two groups, four rounds of one or two rounds of two: no pair is cut."""
    plan = Planned([LEAF * LEAVES_PER_GROUP * 2] * (2 * PROGRAMS // HEADS), device)
    assert plan.unit == LEAVES_PER_GROUP and plan.sizes == [2] * 2 * PROGRAMS
    plan = Planned([LEAF * LEAVES_PER_GROUP] * (5 * PROGRAMS // (2 * HEADS)), device)
    assert plan.unit == LEAVES_PER_GROUP and plan.sizes == [1] * (5 * PROGRAMS // 2)


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
