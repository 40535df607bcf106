"""Tiles of a prompt in halves, where a launch has few of them: the bits of whole tiles, on a Hopper GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional

from kernels.attention import AttentionSpec, PagedArguments, check_attention
from kernels.backend import Backend, is_hopper
from kernels.device import num_multiprocessors
from kernels.graph_capture import graph_capture
from kernels.prefill_attention import PrefillPlan, prefill_attention
from kernels.prefill_attention.hopper import halves_tiles
from kernels.prefill_attention.hopper.few import takes
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import CaseShape, PagedCase, make_case, running_sums
from tests.kernels.target import Target
from tests.kernels.test_prefill_options import coded, packed, run

pytestmark = pytest.mark.gpu

GLUON = Target("cuda", Backend.GLUON)
SHAPE = CaseShape(q_heads=8, kv_heads=2, dim=128, device="cuda")
# Query heads, KV heads and dim, and new tokens: neither so few that keys are shared, nor tiles for all multiprocessors.
HALVED = [
    *product([(8, 2, 256), (2, 1, 256), (12, 2, 64), (16, 2, 192), (17, 17, 128)], [3, 17, 65, 128, 200, 333]),
    *product([(16, 1, 128)], [65, 128, 200, 333]),
    *product([(8, 2, 128)], [200, 333]),
]


def joined(first: PagedCase, second: PagedCase) -> PagedCase:
    """Returns one batch of the sequences of both, those of the first in front."""
    width = max(case.block_tables.shape[1] for case in (first, second))
    tables = [functional.pad(case.block_tables, (0, width - case.block_tables.shape[1])) for case in (first, second)]
    sums = [
        torch.cat([getattr(first, name), getattr(first, name)[-1] + getattr(second, name)[1:]])
        for name in ("cu_seqlens_q", "cu_seqlens_k")
    ]
    return replace(
        first,
        q=torch.cat([first.q, second.q]),
        k_pages=torch.cat([first.k_pages, second.k_pages]),
        v_pages=torch.cat([first.v_pages, second.v_pages]),
        block_tables=torch.cat([tables[0], tables[1] + first.k_pages.shape[0]]),
        cu_seqlens_q=sums[0],
        cu_seqlens_k=sums[1],
        lengths=first.lengths + second.lengths,
        keys=first.keys + second.keys,
        values=first.values + second.values,
    )


def queries(case: PagedCase) -> torch.Tensor:
    """Returns q as the kernel takes it: packed where a kv head's query heads are no divisor of 64."""
    group = case.q.shape[1] // case.k_pages.shape[2]
    return case.q if 64 % group == 0 else packed(case.q, case.k_pages.shape[2])


def num_tiles(case: PagedCase) -> int:
    """Returns the tiles of 128 rows of all sequences and kv heads."""
    kv_heads = case.k_pages.shape[2]
    queries = max(128 * kv_heads // case.q.shape[1], 1)
    return sum(-(-new // queries) for _, new in case.lengths) * kv_heads


def assert_halved_alone(case: PagedCase, mate: PagedCase) -> None:
    """Asserts that tiles are computed in halves where `case` is alone, and whole where `mate` is in the launch."""
    assert halves_tiles(spec_of(case))
    assert not takes(spec_of(case), case.q.shape[0], len(case.lengths)), "keys of few rows are shared"
    assert num_tiles(case) <= num_multiprocessors(case.q.device) // 2 < num_tiles(mate)


def spec_of(case: PagedCase) -> AttentionSpec:
    q = queries(case)
    return check_attention(PagedArguments(q, case.k_pages, case.v_pages, case.layout), packed=q.dim() == 4)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize(("heads", "new"), HALVED, ids=str)
def test_halves_of_few_tiles_have_the_bits_of_whole_ones(heads: tuple[int, int, int], new: int) -> None:
    """Alone, tiles are too few for all multiprocessors; beside a long prompt they are not."""
    shape = replace(SHAPE, **dict(zip(("q_heads", "kv_heads", "dim"), heads, strict=True)))
    case, mate = make_case([(1500, new)], shape), make_case([(0, 8000)], shape, seed=1)
    assert_halved_alone(case, mate)
    whole, whole_lse = run(joined(case, mate), GLUON, q=queries(joined(case, mate)))
    half, half_lse = run(case, GLUON, q=queries(case))
    assert_same_bits(half, whole[:new])
    assert_same_bits(half_lse, whole_lse[:, :new])


@pytest.mark.parametrize("heads", [(8, 2, 128), (8, 8, 128), (2, 1, 256), (8, 2, 256), (12, 2, 64)], ids=str)
def test_sequences_that_leave_second_halves_without_rows(heads: tuple[int, int, int]) -> None:
    """Up to 64 / group new tokens do; one more does not, and neither do sequences without any."""
    shape = replace(SHAPE, **dict(zip(("q_heads", "kv_heads", "dim"), heads, strict=True)))
    most = 64 * shape.kv_heads // shape.q_heads
    lengths = [(1500, 1), (130, most), (0, most), (40, 0), (2000, most - 1), (511, most + 1), (260, 2 * most + 1)]
    case, mate = make_case(lengths, shape), make_case([(0, 8000)], shape, seed=1)
    assert_halved_alone(case, mate)
    tokens = case.q.shape[0]
    whole, whole_lse = run(joined(case, mate), GLUON, q=queries(joined(case, mate)))
    half, half_lse = run(case, GLUON, q=queries(case))
    assert_same_bits(half, whole[:tokens])
    assert_same_bits(half_lse, whole_lse[:, :tokens])


@pytest.mark.parametrize("new", [7, 65, 333])
def test_over_fp8_pages_too(new: int) -> None:
    case, mate = make_case([(1500, new)], SHAPE), make_case([(0, 8000)], SHAPE, seed=1)
    both, options = coded(joined(case, mate), False, GLUON)
    assert num_tiles(case) <= num_multiprocessors(case.q.device) // 2 < num_tiles(mate)
    whole, whole_lse = run(both, GLUON, **options)
    alone = replace(case, q=both.q[:new], k_pages=both.k_pages, v_pages=both.v_pages)
    half, half_lse = run(alone, GLUON, **options)
    assert_same_bits(half, whole[:new])
    assert_same_bits(half_lse, whole_lse[:, :new])


def test_a_captured_step_goes_from_halves_to_whole_tiles_and_back() -> None:
    """The device decides: 100 new tokens are 56 tiles, 333 more 168, in one graph."""
    shape = replace(SHAPE, kv_heads=8, q_heads=64, dim=128)
    short, long = make_case([(900, 100)], shape), make_case([(900, 333)], shape, seed=1)
    both = joined(short, long)
    wanted = [run(case, GLUON) for case in (short, long)]
    sums = [both.cu_seqlens_q.clone(), both.cu_seqlens_k.clone()]
    plan = PrefillPlan(2, 433, 64, 8, 128, device="cuda")
    out, lse = torch.empty_like(both.q), torch.empty(64, 433, device="cuda")

    def step() -> None:
        plan.prepare(*sums)
        pages = (both.k_pages, both.v_pages, both.block_tables)
        prefill_attention(both.q, *pages, *sums, 433, plan=plan, out=out, lse=lse, backend=Backend.GLUON)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step()
    assert num_tiles(short) <= num_multiprocessors(out.device) // 2 < num_tiles(short) + num_tiles(long)
    for new in (0, 333, 0, 333):
        sums[0].copy_(running_sums([100, new], "cuda"))
        sums[1].copy_(running_sums([1000, 900 + new], "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert not plan.count[1:].any()
        assert_same_bits(out[:100], wanted[0][0])
        assert_same_bits(lse[:, :100], wanted[0][1])
        assert_same_bits(out[100 : 100 + new], wanted[1][0][:new])
