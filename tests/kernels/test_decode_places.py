"""decode_attention on Hopper where programs claim places: wherever they land and whatever else runs, all splits are
computed, once, and the counters are back for the next launch.

On any other GPU these tests skip.
"""

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.decode_attention import DecodePlan, decode_attention, plan_buffers
from kernels.graph_capture import graph_capture
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import CaseShape, PagedCase, make_case

pytestmark = pytest.mark.gpu

HEADS = 2
Result = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def num_multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def one_pair_each(kind: str) -> PagedCase:
    """A sequence for every two multiprocessors: of one length, whose pairs stay whole, of many, or one long one."""
    count = num_multiprocessors() // HEADS
    lengths = {
        "equal": [1500] * count,
        "mixed": [1 + 3000 * i // count for i in range(count)],
        "one long": [700] * (count - 1) + [40_000],
    }[kind]
    shape = CaseShape(dim=128, q_heads=4 * HEADS, kv_heads=HEADS, device="cuda")
    return make_case([(length - 1, 1) for length in lengths], shape)


def planned(case: PagedCase) -> DecodePlan:
    count, width = case.block_tables.shape
    plan = DecodePlan(count, width * case.page_tokens, 4 * HEADS, HEADS, 128, device="cuda")
    plan.prepare(case.seqlens_k)
    return plan


def run(case: PagedCase, plan: DecodePlan) -> Result:
    pages = (case.k_pages, case.v_pages, case.block_tables)
    return with_lse(decode_attention, case.q, *pages, case.seqlens_k, plan=plan, backend=Backend.GLUON)


def run_apart(case: PagedCase) -> Result:
    """The sequences in two launches, each of fewer splits."""
    first = case.block_tables.shape[0] // 2
    results = []
    for part in (slice(0, first), slice(first, None)):
        pages = (case.k_pages, case.v_pages, case.block_tables[part])
        results.append(with_lse(decode_attention, case.q[part], *pages, case.seqlens_k[part], backend=Backend.GLUON))
    (out, lse), (other_out, other_lse) = results
    return torch.cat((out, other_out)), torch.cat((lse, other_lse), 1)


def check(got: Result, wanted: Result) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)


def assert_counters_are_back(plan: DecodePlan) -> None:
    torch.cuda.synchronize()
    assert plan.work.tolist() == [0, 0, 0, -1] and not plan.arrivals.any()


@pytest.mark.parametrize("kind", ["equal", "mixed", "one long"])
def test_results_are_those_of_other_launches(kind: str) -> None:
    case = one_pair_each(kind)
    wanted, plan = run_apart(case), planned(case)
    assert plan.is_placed(case.block_tables.shape[0])
    for _ in range(5):
        check(run(case, plan), wanted)
        assert_counters_are_back(plan)


def test_programs_that_draw_further_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many splits as there are leaves."""
    case = one_pair_each("mixed")
    wanted = run_apart(case)
    monkeypatch.setattr(plan_buffers, "COSTS_AT_ONCE", None)
    monkeypatch.setattr(plan_buffers, "COSTS", dict.fromkeys(plan_buffers.COSTS, (0.5, -5.0, 0.0)))
    plan = planned(case)
    assert int(plan.splits[7]) > 2 * num_multiprocessors()
    for _ in range(5):
        check(run(case, plan), wanted)
        assert_counters_are_back(plan)


@pytest.mark.parametrize("kind", ["equal", "mixed", "one long"])
def test_two_streams_at_once_beside_products(kind: str) -> None:
    """Two plans' launches and products that hold multiprocessors: programs begin where there is room."""
    case = one_pair_each(kind)
    wanted, plans = run_apart(case), [planned(case) for _ in range(2)]
    matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        with torch.cuda.stream(streams[2]):
            matrix @ matrix
        results = []
        for plan, stream in zip(plans, streams[:2], strict=True):
            with torch.cuda.stream(stream):
                results.append(run(case, plan))
        torch.cuda.synchronize()
        for plan, got in zip(plans, results, strict=True):
            check(got, wanted)
            assert_counters_are_back(plan)


def test_a_replay_plans_anew() -> None:
    """Three launches in a row in one graph, replayed over lengths of the other kind."""
    cases = {kind: one_pair_each(kind) for kind in ("mixed", "equal")}
    width = max(case.block_tables.shape[1] for case in cases.values())
    count = num_multiprocessors() // HEADS
    seqlens = torch.zeros(count, dtype=torch.int32, device="cuda")
    tables = torch.zeros(count, width, dtype=torch.int32, device="cuda")
    plan = DecodePlan(count, width * 16, 4 * HEADS, HEADS, 128, device="cuda")
    for case in cases.values():
        graph, outs = captured(case, plan, tables, seqlens)
        for kind in ("equal", "mixed", "equal"):
            other = cases[kind]
            # Lengths of the other kind, no longer than this case's pages hold.
            lengths = torch.minimum(other.seqlens_k, case.seqlens_k)
            tables[:, : case.block_tables.shape[1]] = case.block_tables
            seqlens.copy_(lengths)
            graph.replay()
            pages = (case.k_pages, case.v_pages, tables)
            halves = [
                decode_attention(case.q[part], *pages[:2], tables[part], seqlens[part], backend=Backend.GLUON)
                for part in (slice(0, count // 2), slice(count // 2, None))
            ]
            for out in outs:
                assert_same_bits(out, torch.cat(halves))
            assert_counters_are_back(plan)


def captured(
    case: PagedCase, plan: DecodePlan, tables: torch.Tensor, seqlens: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph that plans and attends three times over static lengths and tables."""

    def step() -> list[torch.Tensor]:
        plan.prepare(seqlens)
        pages = (case.k_pages, case.v_pages, tables)
        return [decode_attention(case.q, *pages, seqlens, plan=plan, backend=Backend.GLUON) for _ in range(3)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        outs = step()
    return graph, outs
