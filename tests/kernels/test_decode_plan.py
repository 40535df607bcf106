"""DecodePlan: every leaf in exactly one chunk, in order, whatever the lengths; room is checked by name.

Knows no attention. The plan kernel is plain Triton, so it runs in the interpreter and on a GPU; there is no torch
version of it to test.
"""

import pytest
import torch

from kernels.backend import Backend
from kernels.decode_attention import DecodePlan, decode_attention
from kernels.decode_attention.plan import CHUNK_FIELDS, DRAWS, GROUP, HEADER_FIELDS, LEAF, SHARE
from kernels.errors import KernelArgumentError
from tests.kernels.inputs import CaseShape, make_case
from tests.kernels.target import Target

HEADS = 2
PROGRAMS = 12
MAX_CHUNKS = PROGRAMS * (1 + 2 * DRAWS)

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
        from kernels.decode_attention.plan.kernel import launch

        counts = {"dtype": torch.int32, "device": device}
        bases = torch.full((2 * len(lengths) + 1,), -1, **counts)
        header = torch.full((HEADER_FIELDS,), -1, **counts)
        chunks = torch.full((MAX_CHUNKS * CHUNK_FIELDS,), -1, **counts)
        launch(
            torch.tensor(lengths, **counts),
            bases,
            header,
            chunks,
            kv_heads=HEADS,
            programs=PROGRAMS,
            leaf=LEAF,
            group=GROUP,
            share=SHARE,
            draws=DRAWS,
        )
        self.bases: list[int] = bases.tolist()
        self.large_count, self.large, self.small, self.total = header.tolist()
        self.chunks: list[list[int]] = chunks.view(-1, CHUNK_FIELDS).tolist()

    def sizes(self) -> list[int]:
        """Leaves of every chunk, by the header: what the kernels compute places from."""
        large = [self.large] * self.large_count
        rest = self.total - sum(large)
        return large + [min(self.small, rest - start) for start in range(0, rest, self.small)]


def leaves_of(length: int) -> int:
    return max(1, -(-length // LEAF))


@pytest.fixture
def device(target: Target) -> str:
    if target.backend is Backend.REFERENCE:
        pytest.skip("the plan has no reference")
    return target.device


@pytest.mark.parametrize("name", list(LENGTHS))
def test_chunks_tile_all_leaves(device: str, name: str) -> None:
    lengths = LENGTHS[name]
    plan = Planned(lengths, device)
    leaves = [
        (seq, head, leaf)
        for seq, length in enumerate(lengths)
        for head in range(HEADS)
        for leaf in range(leaves_of(length))
    ]
    sizes = plan.sizes()
    assert plan.total == len(leaves) == sum(sizes) and min(sizes) > 0
    first = 0
    for size, (*place, count, length, num_chunks) in zip(sizes, (chunk[:6] for chunk in plan.chunks), strict=False):
        assert tuple(place) == leaves[first] and length == lengths[leaves[first][0]]
        assert (count, num_chunks) == (size, len(sizes))
        first += size
    assert all(chunk[3] == 0 and chunk[5] == len(sizes) for chunk in plan.chunks[len(sizes) :])


@pytest.mark.parametrize("name", list(LENGTHS))
def test_bases_count_leaves_and_groups(device: str, name: str) -> None:
    counts = [leaves_of(length) for length in LENGTHS[name]]
    groups = [-(-count // GROUP) for count in counts]
    wanted = [sum(part[:seq]) for seq in range(len(counts)) for part in (counts, groups)]
    assert Planned(LENGTHS[name], device).bases == [*wanted, -1]


def test_few_leaves_are_dealt_out_one_by_one(device: str) -> None:
    plan = Planned([LEAF * 5], device)
    assert plan.sizes() == [1] * 5 * HEADS


def test_as_many_groups_as_programs_stay_whole(device: str) -> None:
    plan = Planned([LEAF * GROUP * PROGRAMS // HEADS], device)
    assert plan.sizes() == [GROUP] * PROGRAMS


def test_much_work_is_dealt_out_in_large_chunks_and_drawn_in_small_ones(device: str) -> None:
    """Large chunks are equal and hold whole groups; what is left is cut fine enough to even programs out."""
    plan = Planned([LEAF * 100 * PROGRAMS // HEADS], device)
    assert plan.large_count == PROGRAMS and plan.large % GROUP == 0
    assert 0.5 * plan.total < plan.large_count * plan.large < plan.total
    assert plan.small * 4 <= plan.large


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
