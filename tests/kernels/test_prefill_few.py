"""prefill_attention of few rows on a Hopper GPU: the bits of the kernel for many rows, whatever shares the keys out."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import PagedArguments, check_attention
from kernels.backend import Backend, is_hopper
from kernels.graph_capture import graph_capture
from kernels.layout import KvLayout
from kernels.prefill_attention import PrefillPlan, prefill_attention
from kernels.prefill_attention.call import PrefillCall
from tests.device_waits import no_device_waits
from tests.kernels.compare import assert_same_bits
from tests.kernels.inputs import RISES, CaseShape, PagedCase, make_case, running_sums
from tests.kernels.test_prefill_options import packed

pytest.importorskip("triton")

from kernels.prefill_attention.few_scratch import SLOTS
from kernels.prefill_attention.hopper.few import MOST_ROW_TILES, takes
from kernels.prefill_attention.hopper.few.launch import launch_few
from kernels.prefill_attention.hopper.launch import launch_tiles

SHAPE = CaseShape(q_heads=16, kv_heads=2, dim=128, device="cuda")
LENGTHS: list[list[tuple[int, int]]] = [
    [(4096, 16)],
    [(0, 1)],
    [(127, 1), (128, 1)],
    [(1000, 33)],
    [(3000, 7), (0, 0), (77, 20), (1500, 1)],
    [(2000, 64)],
    [(9000, 2), (4095, 1)],
    [(515, 5)] * 3,
]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def call_of(case: PagedCase, *, packs: bool = True, sinks: bool = False, softcap: float = 0.0) -> PrefillCall:
    kv_heads, q_heads = case.keys[0].shape[1], case.q.shape[1]
    q = packed(case.q, kv_heads) if packs else case.q
    logits = torch.linspace(-4, 9, q_heads, device="cuda") if sinks else None
    given = PagedArguments(q, case.k_pages, case.v_pages, case.layout, softcap=softcap, sinks=logits)
    tables = (case.block_tables, case.cu_seqlens_q, case.cu_seqlens_k, case.max_seqlen_q)
    return PrefillCall(q, case.k_pages, case.v_pages, *tables, logits, check_attention(given, packed=packs))


def plan_of(call: PrefillCall, num_tokens: int) -> PrefillPlan:
    spec = call.spec
    plan = PrefillPlan(call.num_seqs, num_tokens, spec.q_heads, spec.shape.heads, spec.shape.dim, device="cuda")
    plan.prepare(call.cu_seqlens_q, call.cu_seqlens_k)
    return plan


def check(case: PagedCase, **options: Any) -> None:
    """Compares outputs and log-sum-exps with those of whole tiles, in few rounds and in many."""
    call = call_of(case, **options)
    plan = plan_of(call, len(case.q))
    assert plan.few is not None
    tiles, halves, _ = plan.few.extent.tolist()
    row_tiles = tiles * halves * call.spec.shape.heads
    assert 0 < row_tiles <= MOST_ROW_TILES
    wanted, wanted_lse = blank(case)
    launch_tiles(call, plan, wanted, wanted_lse)
    for slots in (SLOTS, 6 * row_tiles, 2 * row_tiles):
        for _ in range(2):
            got, got_lse = blank(case)
            launch_few(call, plan.records, plan.few, got, got_lse, slots=slots)
            assert_same_bits(got, wanted)
            assert_same_bits(got_lse, wanted_lse)
            assert not plan.few.counters.any()


def blank(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.full((case.q.shape[1], len(case.q)), float("nan"), device="cuda")
    return torch.full_like(case.q, float("nan")), lse


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_few_rows_have_the_bits_of_many(lengths: list[tuple[int, int]]) -> None:
    check(make_case(lengths, SHAPE))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {"q_heads": 2},
        {"q_heads": 8},
        {"q_heads": 64, "kv_heads": 1},
        {"dim": 64},
        {"dtype": torch.float16},
        {"page_tokens": 8},
        {"page_tokens": 64, "layout": KvLayout.HND},
        {"page_tokens": 256},
    ],
    ids=str,
)
def test_shapes(change: dict[str, Any]) -> None:
    case = make_case([(1500, 9), (0, 4)], replace(SHAPE, **change))
    check(case)
    check(case, packs=False)


@pytest.mark.gpu
@pytest.mark.parametrize("rise", RISES)
def test_scores_that_rise_from_tile_to_tile(rise: float) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(make_case([(1500, 9), (0, 40)], replace(SHAPE, rise=rise, dtype=dtype)))


@pytest.mark.gpu
def test_options() -> None:
    case = make_case([(1500, 9), (0, 40)], SHAPE)
    check(case, sinks=True)
    check(case, sinks=True, softcap=2.0)
    # Scores are further apart.
    check(replace(case, q=case.q * 4))


@pytest.mark.gpu
def test_a_captured_launch_serves_other_lengths() -> None:
    """Few keys and many, and no query at all, without a wait; counters of one replay do not disturb the next."""
    case = make_case([(6000, 16), (2000, 16)], SHAPE)
    lengths = [running_sums([16, 16], "cuda"), running_sums([6016, 2016], "cuda")]
    call = call_of(case)._replace(cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
    plan = plan_of(call, 32)
    assert takes(call.spec, 32, 2)
    out, _ = blank(case)

    def step() -> None:
        plan.prepare(*lengths)
        prefill_attention(*call[:7], plan=plan, out=out, backend=Backend.GLUON)

    step()
    with no_device_waits():
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        step()
    for cached, new in (((6000, 2000), (16, 16)), ((5, 0), (3, 29)), ((0, 0), (0, 0)), ((1100, 1900), (1, 16))):
        lengths[0].copy_(running_sums(new, "cuda"))
        lengths[1].copy_(running_sums([a + b for a, b in zip(cached, new, strict=True)], "cuda"))
        for _ in range(3):
            graph.replay()
        wanted, _ = blank(case)
        launch_tiles(call, plan, wanted, None)
        assert_same_bits(out[: sum(new)], wanted[: sum(new)])


@pytest.mark.gpu
def test_a_prompts_cuts_change_no_bit() -> None:
    """The last tokens of a prompt, however many: their keys are shared, or their tiles are whole."""
    case = make_case([(0, 1500)], SHAPE)
    q, total = packed(case.q, 2), 1500
    whole = prefill_attention(q, *pages_of(case), case.cu_seqlens_q, case.cu_seqlens_k, total)
    for new in (1, 7, 16, 64, 65, 300):
        part = q[:, total - new :].contiguous()
        got = prefill_attention(part, *pages_of(case), running_sums([new], "cuda"), case.cu_seqlens_k, new)
        assert_same_bits(got, whole[total - new :])


def pages_of(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.k_pages, case.v_pages, case.block_tables
