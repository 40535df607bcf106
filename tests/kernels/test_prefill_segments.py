"""prefill_attention beyond one segment of keys on a Hopper GPU: whole tiles and split ones have the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.backend import Backend, is_hopper
from kernels.graph_capture import graph_capture
from kernels.prefill_attention import PrefillPlan, prefill_attention
from kernels.prefill_attention.units import SPLIT_TILES
from tests.kernels.compare import assert_lse, assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case, running_sums
from tests.kernels.target import Target
from tests.kernels.test_prefill_options import coded

pytest.importorskip("triton")

from kernels.prefill_attention.splits_triton import AUTO, SPLIT, WHOLE, launch

GLUON = Target("cuda", Backend.GLUON)
SHAPE = CaseShape(q_heads=8, kv_heads=2, dim=128, device="cuda")
S = 4096
LENGTHS = [(0, 300), (S - 7, 40), (2 * S + 100, 64), (3 * S - 1, 2), (S, 1)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def run(case: PagedCase, mode: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor, PrefillPlan]:
    """Output, log-sum-exps and the plan of a launch whose tiles are split, whole, or as the plan chooses."""
    q_heads, heads = case.q.shape[1], case.keys[0].shape[1]
    plan = PrefillPlan(len(case.lengths), len(case.q), q_heads, heads, case.q.shape[2], device="cuda", segment_tokens=S)
    plan.prepare(case.cu_seqlens_q, case.cu_seqlens_k)
    choose(plan, mode)
    out, lse = torch.full_like(case.q, float("nan")), torch.empty(q_heads, len(case.q), device="cuda")
    pages = {"k_pages": case.k_pages, "v_pages": case.v_pages} | options
    prefill_attention(
        case.q,
        pages.pop("k_pages"),
        pages.pop("v_pages"),
        case.block_tables,
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        max(new for _, new in case.lengths),
        plan=plan,
        out=out,
        lse=lse,
        layout=case.layout,
        window=case.window,
        segment_tokens=S,
        backend=Backend.GLUON,
        **pages,
    )
    return out, lse, plan


def choose(plan: PrefillPlan, mode: int) -> None:
    if plan.units is not None:
        q_heads, heads, _ = plan.heads
        launch(
            plan.records,
            plan.count,
            plan.units.records,
            plan.units.count,
            heads=heads,
            tile_queries=128 // (q_heads // heads),
            tile_keys=128,
            segment=S,
            programs=132,
            max_tiles=SPLIT_TILES,
            mode=mode,
        )


def part(case: PagedCase, chunks: list[tuple[int, int, int]]) -> PagedCase:
    """Chunks (sequence, first new position, end) of a case's sequences, in one batch."""
    starts = case.cu_seqlens_q.tolist()
    rows = [range(starts[s] + a - case.lengths[s][0], starts[s] + b - case.lengths[s][0]) for s, a, b in chunks]
    return replace(
        case,
        q=torch.cat([case.q[row.start : row.stop] for row in rows]),
        lengths=tuple((a, b - a) for _, a, b in chunks),
        block_tables=case.block_tables[[s for s, _, _ in chunks]].contiguous(),
        cu_seqlens_q=running_sums([b - a for _, a, b in chunks], "cuda"),
        cu_seqlens_k=running_sums([b for *_, b in chunks], "cuda"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [{}, {"dim": 64, "q_heads": 16}, {"dim": 96, "page_tokens": 8}, {"dim": 256}, {"rise": 2.0}, {"rise": 20.0}],
    ids=str,
)
def test_whole_and_split_tiles_are_right_and_have_the_same_bits(change: dict[str, Any]) -> None:
    case = make_case(LENGTHS, replace(SHAPE, **change))
    sinks = torch.linspace(-4, 4, case.q.shape[1], device="cuda")
    wanted, wanted_lse = dense_attention(case, sinks=sinks)
    (whole, whole_lse, _), (split, split_lse, plan) = (run(case, mode, sinks=sinks) for mode in (WHOLE, SPLIT))
    assert_output(whole, wanted)
    assert_lse(whole_lse, wanted_lse)
    assert_same_bits(split, whole)
    assert_same_bits(split_lse, whole_lse)
    if change.get("dim") == 256:
        assert plan.units is None
    else:
        assert plan.units is not None and int(plan.units.count) > 0 and not plan.units.arrivals.any()
    assert plan.count[1:].tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [300, S + 100])
def test_windows_are_one_segment(window: int) -> None:
    case = replace(make_case(LENGTHS, SHAPE), window=window)
    whole, split = (run(case, mode)[0] for mode in (WHOLE, SPLIT))
    assert_output(whole, dense_attention(case)[0])
    assert_same_bits(split, whole)


@pytest.mark.gpu
def test_fp8_pages() -> None:
    case, options = coded(make_case(LENGTHS, SHAPE), False, GLUON)
    whole, split = (run(case, mode, **options)[0] for mode in (WHOLE, SPLIT))
    assert_output(whole, dense_attention(case)[0])
    assert_same_bits(split, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 16, 33, 500])
def test_no_cut_and_no_mate_changes_a_bit(new: int) -> None:
    total = 2 * S + 1000
    case = make_case([(0, total), (3 * S, 30), (70, 9)], SHAPE)
    whole = run(part(case, [(0, 0, total)]), WHOLE)[0]
    starts = [a for edge in (S, 2 * S, total) for a in (edge - new, edge - new // 2, edge) if a + new <= total]
    for start in [0, 777, *starts]:
        alone, mates = [(0, start, start + new)], [(1, 3 * S, 3 * S + 30), (0, start, start + new), (2, 70, 79)]
        for mode in (AUTO, WHOLE, SPLIT):
            assert_same_bits(run(part(case, alone), mode)[0], whole[start : start + new])
            assert_same_bits(run(part(case, mates), mode)[0][30 : 30 + new], whole[start : start + new])


@pytest.mark.gpu
def test_a_captured_step_splits_and_stays_whole_by_its_lengths() -> None:
    case = make_case([(3 * S, 16), (2 * S, 16)], SHAPE)
    plan, lengths = PrefillPlan(2, 32, 8, 2, 128, device="cuda", segment_tokens=S), running_sums([S, 2 * S], "cuda")
    out = torch.empty_like(case.q)

    def step() -> None:
        plan.prepare(case.cu_seqlens_q, lengths)
        pages = (case.k_pages, case.v_pages, case.block_tables)
        prefill_attention(
            case.q, *pages, case.cu_seqlens_q, lengths, 16, plan=plan, out=out, segment_tokens=S, backend=Backend.GLUON
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step()
    for first, second, splits in (
        (3 * S, 2 * S, True),
        (1000, 3000, False),
        (S + 1, 16, False),
        (200, 2 * S + 5, True),
    ):
        lengths.copy_(running_sums([first, second], "cuda"))
        graph.replay()
        assert plan.units is not None and (int(plan.units.count) > 0) == splits
        fresh = replace(case, lengths=((first - 16, 16), (second - 16, 16)), cu_seqlens_k=lengths.clone())
        assert_same_bits(out, run(fresh, WHOLE)[0])
