"""prefill_attention's Gluon kernel on a Hopper GPU: right, invariant, replayable; and which cases it takes."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import PagedArguments, check_attention
from kernels.backend import Backend, is_hopper
from kernels.errors import KernelArgumentError
from kernels.graph_capture import graph_capture
from kernels.layout import KvLayout
from kernels.prefill_attention import PrefillPlan, prefill_attention
from kernels.prefill_attention.hopper import reason_against_case
from tests.kernels.compare import assert_attention, assert_lse, assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import RISES, CaseShape, PagedCase, make_case, running_sums
from tests.kernels.routes import prefill_route
from tests.kernels.target import Target
from tests.kernels.test_prefill_attention import RAGGED, cut
from tests.kernels.test_prefill_options import coded, packed, run

GLUON = Target("cuda", Backend.GLUON)
SHAPE = CaseShape(q_heads=8, kv_heads=2, dim=128, device="cuda")
LENGTHS = [*RAGGED, (700, 300)]
CUTS = [[512], [1024], [77], [512, 1024], [1499], [1, 2, 3, 640]]


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def check(case: PagedCase, **options: object) -> None:
    assert prefill_route(case.q, case.k_pages, case.v_pages, layout=case.layout) is Backend.GLUON
    out, lse = run(case, GLUON, **options)
    truth = {name: options[name] for name in ("scale", "sinks", "softcap") if name in options}
    wanted, wanted_lse = dense_attention(case, **truth)  # type: ignore[arg-type]
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestAgainstDenseAttention:
    @pytest.mark.parametrize("window", [0, 1, 20, 200])
    @pytest.mark.parametrize("layout", [KvLayout.NHD, KvLayout.HND])
    def test_ragged_batch(self, layout: KvLayout, window: int) -> None:
        check(make_case(LENGTHS, replace(SHAPE, layout=layout, window=window)))

    @pytest.mark.parametrize("page_tokens", [8, 16, 32, 64, 128, 256])
    def test_page_sizes(self, page_tokens: int) -> None:
        check(make_case(LENGTHS, replace(SHAPE, page_tokens=page_tokens)))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
    def test_head_dims(self, dim: int, dtype: torch.dtype) -> None:
        check(make_case(LENGTHS, replace(SHAPE, dim=dim, dtype=dtype)))

    @pytest.mark.parametrize("group", [1, 2, 8, 16])
    def test_groups(self, group: int) -> None:
        check(make_case(LENGTHS, replace(SHAPE, q_heads=2 * group)))

    @pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 16])
    def test_packed_queries(self, group: int) -> None:
        case = make_case(LENGTHS, replace(SHAPE, q_heads=2 * group))
        assert_attention(run(case, GLUON, q=packed(case.q, 2)), dense_attention(case))

    @pytest.mark.parametrize("window", [0, 50])
    def test_options(self, window: int) -> None:
        case = make_case(LENGTHS, replace(SHAPE, window=window))
        sinks = torch.linspace(-4, 9, 8, device="cuda")
        check(case, sinks=sinks)
        check(case, scale=0.31)
        check(case, softcap=2.0, sinks=sinks.bfloat16())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("window", [0, 50])
    def test_fp8_pages(self, window: int, dtype: torch.dtype) -> None:
        case, options = coded(make_case(LENGTHS, replace(SHAPE, dtype=dtype)), False, GLUON)
        case = replace(case, window=window)
        options |= {"sinks": torch.linspace(-4, 4, 8, device="cuda")}
        for extra in ({}, {"softcap": 3.0}, {"q": packed(case.q, 2)}):
            out, lse = run(case, GLUON, **options, **extra)
            wanted, wanted_lse = dense_attention(
                case,
                sinks=options["sinks"],
                softcap=float(extra.get("softcap", 0.0)),  # type: ignore[arg-type]
            )
            assert_output(out, wanted)
            assert_lse(lse, wanted_lse)

    @pytest.mark.parametrize("size", [1e-5, 2e4])
    def test_fp8_pages_and_queries_that_fp16_does_not_reach(self, size: float) -> None:
        case = make_case(LENGTHS, SHAPE)
        case, options = coded(replace(case, q=(case.q.float() * size).to(case.q.dtype)), False, GLUON)
        for extra in ({}, {"softcap": 3.0}):
            assert_attention(
                run(case, GLUON, **options, **extra, scale=0.1 / size), dense_attention(case, scale=0.1 / size, **extra)
            )

    @pytest.mark.parametrize("rise", RISES)
    @pytest.mark.parametrize("window", [0, 200])
    def test_scores_that_rise_from_tile_to_tile(self, window: int, rise: float) -> None:
        for change in ({}, {"dtype": torch.float16}, {"dim": 256}):
            check(make_case(LENGTHS, replace(SHAPE, window=window, rise=rise, **change)))

    def test_given_output_and_queries_inside_wider_rows(self) -> None:
        case = make_case([(16, 20), (0, 200)], SHAPE)
        wide = torch.full((220, 12, 128), float("nan"), dtype=case.q.dtype, device="cuda")
        wide[:, 2:10] = case.q
        out = torch.zeros(220, 12, 128, dtype=case.q.dtype, device="cuda")
        got, _ = run(case, GLUON, q=wide[:, 2:10], out=out[:, 3:11])
        assert_same_bits(got, run(case, GLUON)[0])
        assert not out[:, :3].any() and not out[:, 11:].any()

    def test_a_pool_beyond_two_billion_elements(self) -> None:
        case = make_case([(40, 9), (0, 20)], SHAPE)
        count, size = case.k_pages.shape[0], case.k_pages[0].numel()
        stride = (2**31 // (count - 1) // size + 2) * size
        pool = torch.empty((count - 1) * stride + 2 * size, dtype=case.q.dtype, device="cuda")
        k_pages, v_pages = (
            pool[shift:].as_strided(pages.shape, (stride, *pages.stride()[1:])).copy_(pages)
            for shift, pages in ((0, case.k_pages), (size, case.v_pages))
        )
        assert_same_bits(run(replace(case, k_pages=k_pages, v_pages=v_pages), GLUON)[0], run(case, GLUON)[0])

    def test_tokens_of_no_sequence_are_left_alone(self) -> None:
        case = make_case([(16, 40), (0, 9)], replace(SHAPE, q_heads=4, kv_heads=1))
        wanted, _ = run(case, GLUON)
        shorter = replace(case, cu_seqlens_q=running_sums([40, 0], "cuda"), cu_seqlens_k=running_sums([56, 0], "cuda"))
        got, lse = run(shorter, GLUON)
        assert_same_bits(got[:40], wanted[:40])
        assert not got[40:].any() and bool((lse[:, 40:] == float("-inf")).all())
        nobody = running_sums([0, 0], "cuda")
        got, lse = run(replace(case, cu_seqlens_q=nobody, cu_seqlens_k=nobody), GLUON)
        assert not got.any() and bool((lse == float("-inf")).all())

    def test_empty_batches(self) -> None:
        out, lse = run(make_case([(16, 0), (0, 0)], SHAPE), GLUON)
        assert out.shape == (0, 8, 128) and lse.shape == (8, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestInvariance:
    @pytest.mark.parametrize("window", [0, 50, 300])
    @pytest.mark.parametrize(("group", "dim"), [(4, 128), (1, 128), (8, 64), (4, 256)])
    def test_no_cut_and_no_mate_changes_a_bit(self, group: int, dim: int, window: int) -> None:
        shape = replace(SHAPE, q_heads=2 * group, dim=dim)
        case = replace(make_case([(0, 1500)], shape), window=window)
        mate = make_case([(23, 340)], shape, seed=1)
        whole, _ = run(case, GLUON)
        for cuts in CUTS:
            assert_same_bits(cut(case, cuts, mate, GLUON), whole)

    @pytest.mark.parametrize("rise", RISES)
    def test_nor_where_scores_rise(self, rise: float) -> None:
        for change in ({}, {"dtype": torch.float16}, {"dim": 256}):
            shape = replace(SHAPE, rise=rise, **change)
            case, mate = make_case([(0, 1500)], shape), make_case([(23, 340)], shape, seed=1)
            whole, _ = run(case, GLUON)
            for cuts in CUTS:
                assert_same_bits(cut(case, cuts, mate, GLUON), whole)

    def test_neither_pages_nor_layout_nor_packing_change_a_bit(self) -> None:
        case = make_case([(300, 900)], SHAPE)
        whole, whole_lse = run(case, GLUON)
        others = [
            make_case([(300, 900)], replace(SHAPE, page_tokens=page_tokens, layout=layout))
            for page_tokens, layout in ((8, KvLayout.NHD), (64, KvLayout.NHD), (256, KvLayout.HND), (16, KvLayout.HND))
        ]
        for other in others:
            got, lse = run(replace(other, q=case.q), GLUON)
            assert_same_bits(got, whole)
            assert_same_bits(lse, whole_lse)
        got, lse = run(case, GLUON, q=packed(case.q, 2))
        assert_same_bits(got, whole)
        assert_same_bits(lse, whole_lse)

    def test_page_ids_and_repetition_change_no_bit(self) -> None:
        case = make_case([(300, 900), (0, 333)], SHAPE)
        order = torch.randperm(case.k_pages.shape[0], device="cuda")
        tables = torch.argsort(order)[case.block_tables.long()].int()
        moved = replace(case, k_pages=case.k_pages[order], v_pages=case.v_pages[order], block_tables=tables)
        whole, _ = run(case, GLUON)
        for again in (case, moved):
            assert_same_bits(run(again, GLUON)[0], whole)

    @pytest.mark.parametrize("new", [100, 128])
    def test_queries_are_read_before_the_next_ones_come(self, new: int) -> None:
        """Tiles of one key tile ask for the next queries at once, and stores to new memory delay what loads them."""
        case = make_case([(0, new)] * 16, replace(SHAPE, q_heads=32, kv_heads=8))
        pages = (case.k_pages, case.v_pages, case.block_tables)
        lengths = (case.cu_seqlens_q, case.cu_seqlens_k, new)
        outs = [prefill_attention(packed(case.q, 8), *pages, *lengths, backend=Backend.GLUON) for _ in range(30)]
        assert_output(outs[0], prefill_attention(case.q, *pages, *lengths, backend=Backend.REFERENCE))
        for out in outs[1:]:
            assert_same_bits(out, outs[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_captured_step_replays_with_other_lengths() -> None:
    """Two layers share one plan; lengths, pages and queries change between replays."""
    first, second = make_case([(40, 90), (0, 170)], SHAPE), make_case([(500, 250), (3, 10)], SHAPE, seed=1)
    wanted = [run(case, GLUON)[0] for case in (first, second)]
    pages = [torch.cat([getattr(case, name) for case in (first, second)]) for name in ("k_pages", "v_pages")]
    width = max(case.block_tables.shape[1] for case in (first, second))
    tables = torch.zeros(2, width, dtype=torch.int32, device="cuda")
    q, sums = torch.empty_like(first.q), [torch.empty_like(first.cu_seqlens_q) for _ in range(2)]
    plan = PrefillPlan(2, 260, 8, 2, 128, device="cuda")

    def load(case: PagedCase, offset: int) -> None:
        tables.zero_()
        tables[:, : case.block_tables.shape[1]] = case.block_tables + offset
        q.copy_(case.q)
        sums[0].copy_(case.cu_seqlens_q)
        sums[1].copy_(case.cu_seqlens_k)

    def step() -> list[torch.Tensor]:
        plan.prepare(*sums)
        return [prefill_attention(q, *pages, tables, *sums, 260, plan=plan) for _ in range(2)]

    load(first, 0)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(graph):
        layers = step()
    for case, offset, right in ((second, first.k_pages.shape[0], wanted[1]), (first, 0, wanted[0])):
        load(case, offset)
        graph.replay()
        torch.cuda.synchronize()
        for layer in layers:
            assert_same_bits(layer, right)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"layout": KvLayout.HND}, None),
        ({"dtype": torch.float16, "dim": 256}, None),
        ({"page_tokens": 8}, None),
        ({"dim": 96}, None),
        ({"q_heads": 32}, None),
        ({"page_tokens": 4}, "page_tokens 4"),
        ({"dim": 32}, "dim 32"),
        ({"q_heads": 6}, "groups of 3"),
        ({"dtype": torch.float32}, "torch.float32 queries"),
        ({"layout": KvLayout.SHUFFLE}, "SHUFFLE"),
    ],
)
def test_which_cases_the_kernel_takes(change: dict[str, object], reason: str | None) -> None:
    """Written down, so that a case cannot fall back to the plain kernel unseen."""
    case = make_case([(4, 5)], replace(SHAPE, device="cpu", **change))  # type: ignore[arg-type]
    pages = (case.k_pages, case.v_pages)
    spec = check_attention(PagedArguments(case.q, *pages, case.layout))
    got = reason_against_case(case.q, *pages, spec)
    assert got is None if reason is None else reason in str(got)
    assert prefill_route(case.q, *pages, layout=case.layout) is Backend.REFERENCE


@pytest.mark.parametrize(("per_token", "reason"), [(False, None), (True, "scales PER_TOKEN")])
def test_which_fp8_pages_the_kernel_takes(per_token: bool, reason: str | None) -> None:
    case = make_case([(4, 5)], replace(SHAPE, device="cpu"))
    case, options = coded(case, per_token, Target("cpu", Backend.REFERENCE))
    k_pages, v_pages, k_scales, v_scales = (options[name] for name in ("k_pages", "v_pages", "k_scales", "v_scales"))
    given = PagedArguments(case.q, k_pages, v_pages, case.layout, None, k_scales, v_scales)  # type: ignore[arg-type]
    spec = check_attention(given)
    got = reason_against_case(case.q, k_pages, v_pages, spec)  # type: ignore[arg-type]
    assert got is None if reason is None else reason in str(got)


def test_odd_groups_are_taken_when_packed() -> None:
    case = make_case([(4, 5)], replace(SHAPE, device="cpu", q_heads=10))
    q, pages = packed(case.q, 2), (case.k_pages, case.v_pages)
    spec = check_attention(PagedArguments(q, *pages, case.layout), packed=True)
    assert reason_against_case(q, *pages, spec) is None


@pytest.mark.parametrize("scale", [0.0, -0.1, 1e9])
def test_unusual_scales_go_to_the_plain_kernel(scale: float) -> None:
    case = make_case([(4, 5)], replace(SHAPE, device="cpu"))
    pages = (case.k_pages, case.v_pages)
    spec = check_attention(PagedArguments(case.q, *pages, case.layout, scale))
    assert "scale" in str(reason_against_case(case.q, *pages, spec))


def test_asking_for_the_kernel_where_it_cannot_run_is_refused() -> None:
    case = make_case([(4, 5)], replace(SHAPE, device="cpu"))
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        run(case, Target("cpu", Backend.GLUON))
    sums = running_sums([5])
    assert prefill_attention(case.q, case.k_pages, case.v_pages, case.block_tables, sums, sums, 5).shape == (5, 8, 128)
