"""decode_attention on Hopper: the Gluon kernel against dense attention, and the promise that nothing around a sequence
changes its bits: other requests, programs, splits, repetition, other new tokens, replays of a captured graph.

On any other GPU these tests skip. All memory that no sequence holds is NaN (tests/kernels/inputs.py).
"""

from dataclasses import replace

import pytest
import torch

from kernels.attention import with_lse
from kernels.backend import Backend
from kernels.decode_attention import DecodePlan, decode_attention, plan_buffers, splits_triton
from kernels.errors import KernelArgumentError
from kernels.fp8 import E4M3
from kernels.graph_capture import graph_capture
from kernels.layout import KvLayout
from tests.kernels.compare import assert_attention, assert_lse, assert_output, assert_same_bits
from tests.kernels.dense import dense_attention
from tests.kernels.inputs import CaseShape, PagedCase, make_case
from tests.kernels.routes import decode_route
from tests.kernels.test_decode_tokens import check_shifted, shifted, widened

pytestmark = pytest.mark.gpu

# Around tiles of 64, leaves of 512 and groups of 2048 keys; nothing; long enough for several splits.
LENGTHS = [1, 63, 64, 65, 511, 512, 513, 2047, 2048, 2049, 0, 5000, 9001]
Result = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def decoding(lengths: list[int], seed: int = 0, **shape: object) -> PagedCase:
    given = {"dim": 128, "q_heads": 8, "kv_heads": 2, "device": "cuda"} | shape
    return make_case([(max(length - 1, 0), min(length, 1)) for length in lengths], CaseShape(**given), seed)  # type: ignore[arg-type]


def run(case: PagedCase, **options: object) -> Result:
    """A case of one token each, rows of padding among them."""
    rows = torch.zeros(len(case.lengths), *case.q.shape[1:], dtype=case.q.dtype, device="cuda")
    alive = torch.tensor([new == 1 for _, new in case.lengths], device="cuda")
    rows[alive] = case.q
    given = {"window": case.window, "layout": case.layout, "backend": Backend.GLUON} | options
    pages = (case.k_pages, case.v_pages, case.block_tables)
    out, lse = with_lse(decode_attention, rows, *pages, case.seqlens_k, **given)
    assert not out[~alive].any() and bool((lse[:, ~alive] == float("-inf")).all())
    return out[alive], lse[:, alive]


def check(case: PagedCase, **options: object) -> None:
    out, lse = run(case, **options)
    facts = {name: options[name] for name in ("scale", "sinks", "softcap") if name in options}
    wanted, wanted_lse = dense_attention(case, **facts)  # type: ignore[arg-type]
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)


@pytest.mark.parametrize("window", [0, 1, 300, 3000])
@pytest.mark.parametrize("layout", [KvLayout.NHD, KvLayout.HND])
def test_ragged_batch(layout: KvLayout, window: int) -> None:
    check(decoding(LENGTHS, layout=layout, window=window))


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("layout", [KvLayout.NHD, KvLayout.HND])
def test_page_sizes(page_tokens: int, layout: KvLayout) -> None:
    check(decoding([3, page_tokens, 2 * page_tokens + 1, 3000], page_tokens=page_tokens, layout=layout))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    check(decoding(LENGTHS, dim=dim, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16])
def test_groups_of_query_heads(group: int) -> None:
    check(decoding([100, 3000], q_heads=2 * group))


def test_options_together() -> None:
    sinks = torch.linspace(-3.0, 6.0, 8, device="cuda")
    check(decoding(LENGTHS, window=700), sinks=sinks, softcap=15.0, scale=0.2)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp8_pages(dim: int) -> None:
    case = decoding([1, 70, 600, 3000], dim=dim, dtype=E4M3)
    case = replace(case, q=torch.randn(case.q.shape, device="cuda").to(torch.bfloat16))
    scales = (torch.tensor([0.4], device="cuda"), torch.tensor([1.3], device="cuda"))
    assert_attention(run(case, k_scales=scales[0], v_scales=scales[1]), dense_attention(widened(case, *scales)))


def test_a_pool_beyond_two_billion_elements() -> None:
    """Pages lie a whole number of rows apart, as the copy engine wants them; what lies between is not touched."""
    case = decoding([49, 700])
    count, row = case.k_pages.shape[0], case.k_pages[0, 0].numel()
    stride = (2**31 // (count - 1) // row + 2 * case.page_tokens) * row
    pool = torch.empty(count * stride, dtype=case.q.dtype, device="cuda")
    shape, steps = case.k_pages.shape, (stride, *case.k_pages.stride()[1:])
    k_pages, v_pages = (pool[at:].as_strided(shape, steps) for at in (0, case.k_pages[0].numel()))
    k_pages.copy_(case.k_pages)
    v_pages.copy_(case.v_pages)
    assert_same_bits(run(replace(case, k_pages=k_pages, v_pages=v_pages))[0], run(case)[0])


def alone(case: PagedCase, seq: int) -> PagedCase:
    row = int(case.cu_seqlens_q[seq])
    return replace(
        case,
        lengths=(case.lengths[seq],),
        q=case.q[row : row + case.lengths[seq][1]],
        block_tables=case.block_tables[seq : seq + 1],
        cu_seqlens_k=case.cu_seqlens_k[seq : seq + 2] - case.cu_seqlens_k[seq],
    )


@pytest.mark.parametrize("window", [0, 700])
def test_other_requests_change_no_bit(window: int) -> None:
    case = decoding(LENGTHS, window=window)
    together, lse = run(case)
    for seq, (_, new) in enumerate(case.lengths):
        row = slice(int(case.cu_seqlens_q[seq]), int(case.cu_seqlens_q[seq]) + new)
        out, own_lse = run(alone(case, seq))
        assert_same_bits(out, together[row])
        assert_same_bits(own_lse, lse[:, row])


@pytest.mark.parametrize("programs", [1, 5, 33, 132, 264, 700])
@pytest.mark.parametrize("window", [0, 3000])
def test_programs_and_chunks_change_no_bit(programs: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = decoding([9001, 40, 513, 6000, 2048], window=window)
    wanted = run(case)
    monkeypatch.setattr(DecodePlan, "programs", lambda self, num_seqs: programs)
    # As the model has it; cuts that are dear, cost nothing, are worth something: from few splits to one for each leaf.
    monkeypatch.setattr(plan_buffers, "COSTS_AT_ONCE", None)
    for costs in (plan_buffers.COSTS[2], (0.5, 50.0, 5.0), (1.0, 0.0, 0.0), (0.5, -5.0, 0.0)):
        monkeypatch.setattr(plan_buffers, "COSTS", dict.fromkeys(plan_buffers.COSTS, costs))
        for got, right in zip(run(case), wanted, strict=True):
            assert_same_bits(got, right)


@pytest.mark.parametrize("splits", range(1, 18))
@pytest.mark.parametrize("window", [0, 2500])
def test_cuts_change_no_bit(splits: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of 17 leaves in as many equal splits: cuts at every leaf of a group, several in one, and none."""
    case = decoding([8193, 8700, 4600], window=window)
    wanted = run(case)
    launch = splits_triton.launch

    def cut(*args: object, **options: object) -> None:
        """Plans with costs that make cuts free, so that pairs are cut into as many splits as there are programs."""
        free = {"programs": splits * 3 * 2, "costs": (1.0, 0.0, 0.0), "costs_at_once": None}
        launch(*args, **{**options, **free})  # type: ignore[arg-type]

    monkeypatch.setattr(splits_triton, "launch", cut)
    for got, right in zip(run(case), wanted, strict=True):
        assert_same_bits(got, right)


def fewest_splits(plan: DecodePlan) -> int:
    """Returns the least of the pairs' numbers of splits, below 0 if one is cut at groups."""
    splits = plan.splits.view(-1, plan_buffers.SPLIT_FIELDS)
    return int(splits[: int(splits[0, 7]), 5].min())


@pytest.mark.parametrize("window", [0, 2500])
def test_cuts_at_groups_change_no_bit(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence among short ones, as an H200's plan cuts it, and as one does whose programs claim no places."""
    case = decoding([1000] * 7 + [60_000] + [1000] * 8, window=window, q_heads=32, kv_heads=8)
    own = planned(case, 0)
    assert fewest_splits(own) < 0
    got = run(case, plan=own)
    monkeypatch.setattr(DecodePlan, "is_placed", lambda self, num_seqs: False)
    without = planned(case, 0)
    assert fewest_splits(without) > 0
    for mine, right in zip(got, run(case, plan=without), strict=True):
        assert_same_bits(mine, right)


# Around leaves and groups of keys, long enough that a shared plan cuts far from the window, and nothing.
WINDOWED = [1, 511, 512, 513, 1024, 2047, 2048, 2049, 0, 4095, 4097, 8191, 8192, 8193, 20_479, 30_000]
WINDOWS = (1, 64, 127, 128, 512, 513, 1024, 4096)


def planned(case: PagedCase, window: int, max_q_tokens: int = 1) -> DecodePlan:
    """A plan of the window's keys; window 0: of all."""
    heads = (case.q.shape[1], case.k_pages.shape[2], case.q.shape[2])
    longest = case.block_tables.shape[1] * case.page_tokens
    made = DecodePlan(len(case.lengths), longest, *heads, max_q_tokens=max_q_tokens, window=window, device="cuda")
    made.prepare(case.seqlens_k)
    return made


def check_plans(case: PagedCase, **options: object) -> None:
    """The plan of a window gives the bits of the plan of all keys, on its second run as on its first."""
    wanted = run(case, plan=planned(case, 0), **options)
    own = planned(case, case.window)
    for _ in range(2):
        for got, right in zip(run(case, plan=own, **options), wanted, strict=True):
            assert_same_bits(got, right)


@pytest.mark.parametrize("lengths", [[20_479], [8193, 0, 30_000], WINDOWED], ids=["1", "3", "16"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_plan_for_a_window_changes_no_bit(window: int, lengths: list[int]) -> None:
    case = decoding(lengths, window=window)
    check_plans(case)
    check(case, plan=planned(case, window))


@pytest.mark.parametrize("length", [length + more for length in (512, 4096, 6144, 20_480) for more in (-1, 0, 1)])
@pytest.mark.parametrize("window", [128, 513, 4096])
def test_a_plan_for_a_window_around_leaves(window: int, length: int) -> None:
    check_plans(decoding([length], window=window))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [128, 1024, 4096])
def test_a_plan_for_a_window_with_options(window: int, dim: int) -> None:
    case = decoding(WINDOWED, dim=dim, window=window)
    check_plans(case, sinks=torch.linspace(-3.0, 6.0, 8, device="cuda"), softcap=15.0)
    codes = decoding(WINDOWED, dim=dim, window=window, dtype=E4M3)
    codes = replace(codes, q=torch.randn(codes.q.shape, device="cuda").to(torch.bfloat16))
    check_plans(codes, k_scales=torch.tensor([0.4], device="cuda"), v_scales=torch.tensor([1.3], device="cuda"))


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("window", WINDOWS)
def test_a_plan_for_a_window_of_several_tokens(window: int, tokens: int) -> None:
    spans = [(length, min(tokens, 1 + at % 8)) for at, length in enumerate((0, 508, 2044, 4096, 8190, 20_475, 9000))]
    case = make_case(spans, CaseShape(dim=128, q_heads=16, kv_heads=2, window=window, device="cuda"))
    pages = (case.k_pages, case.v_pages, case.block_tables)
    shared, own = (
        with_lse(
            decode_attention,
            case.q,
            *pages,
            case.seqlens_k,
            cu_seqlens_q=case.cu_seqlens_q,
            max_q_tokens=tokens,
            window=window,
            plan=planned(case, for_window, tokens),
            backend=Backend.GLUON,
        )
        for for_window in (0, window)
    )
    for got, right in zip(own, shared, strict=True):
        assert_same_bits(got, right)


@pytest.mark.parametrize("splits", range(1, 10))
@pytest.mark.parametrize("window", [513, 4096])
def test_cuts_of_a_window_change_no_bit(splits: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = decoding([8193, 8700, 20_000], window=window)
    wanted = run(case, plan=planned(case, 0))
    launch = splits_triton.launch

    def cut(*args: object, **options: object) -> None:
        free = {"programs": splits * 3 * 2, "costs": (1.0, 0.0, 0.0), "costs_at_once": None}
        launch(*args, **{**options, **free})  # type: ignore[arg-type]

    monkeypatch.setattr(splits_triton, "launch", cut)
    for got, right in zip(run(case, plan=planned(case, window)), wanted, strict=True):
        assert_same_bits(got, right)


def test_a_second_run_has_the_same_bits() -> None:
    """The counters are back at zero; a plan serves smaller batches, too."""
    case = decoding(LENGTHS)
    own = DecodePlan(40, 1 << 15, 8, 2, 128, device="cuda")
    own.prepare(case.seqlens_k)
    first = run(case, plan=own)
    for _ in range(5):
        assert_same_bits(run(case, plan=own)[0], first[0])
    small = alone(case, len(LENGTHS) - 1)
    own.prepare(small.seqlens_k)
    assert_same_bits(run(small, plan=own)[0], first[0][-1:])


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_tokens_computed_together_have_the_bits_of_tokens_alone(heads: int, window: int) -> None:
    """32 columns are one launch: 8 tokens of 4 heads; of 8 heads they take two launches, of 16 four."""
    spans = [(0, 1), (0, 8), (508, 8), (2044, 8), (600, 3), (9000, 2), (63, 1)]
    case = make_case(spans, CaseShape(dim=128, q_heads=heads, kv_heads=2, window=window, device="cuda"))
    pages = (case.k_pages, case.v_pages, case.block_tables)
    options = {"window": window, "backend": Backend.GLUON}
    spanned = {"cu_seqlens_q": case.cu_seqlens_q, "max_q_tokens": 8}
    out, lse = with_lse(decode_attention, case.q, *pages, case.seqlens_k, **spanned, **options)
    wanted, wanted_lse = dense_attention(case)
    assert_output(out, wanted)
    assert_lse(lse, wanted_lse)
    last = case.cu_seqlens_q[1:].long() - 1
    single, single_lse = with_lse(decode_attention, case.q[last], *pages, case.seqlens_k, **options)
    assert_same_bits(single, out[last])
    assert_same_bits(single_lse, lse[:, last].contiguous())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_sequence_without_a_query_moves_no_row(dim: int) -> None:
    check_shifted(*shifted("cuda", dim=dim), Backend.GLUON)


class Captured:
    """One captured step over static tensors: two layers, one of them windowed, and a plan for each."""

    def __init__(self, case: PagedCase, rows: int, width: int) -> None:
        self.q = torch.zeros(rows, *case.q.shape[1:], dtype=case.q.dtype, device="cuda")
        self.tables = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
        self.seqlens = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.pages = (case.k_pages.clone(), case.v_pages.clone())
        # Of all keys, and of a window's.
        self.plans = {
            window: DecodePlan(rows, width * 16, 8, 2, 128, window=window, device="cuda") for window in (0, 500)
        }
        self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with graph_capture(self.graph):
            self.out = self.step()

    def step(self) -> list[torch.Tensor]:
        for own in self.plans.values():
            own.prepare(self.seqlens)
        args = (self.q, *self.pages, self.tables, self.seqlens)
        return [
            decode_attention(*args, window=window, plan=own, backend=Backend.GLUON)
            for window, own in self.plans.items()
        ]

    def replay(self, case: PagedCase) -> list[torch.Tensor]:
        count, width = case.block_tables.shape
        for tensor in (self.q, self.tables, self.seqlens):
            tensor.zero_()
        self.q[:count], self.seqlens[:count] = case.q, case.seqlens_k
        self.tables[:count, :width] = case.block_tables
        self.pages[0].copy_(case.k_pages)
        self.pages[1].copy_(case.v_pages)
        self.graph.replay()
        assert all(not out[count:].any() for out in self.out)
        return [out[:count] for out in self.out]


def test_a_replay_follows_lengths_tables_and_pages() -> None:
    """Captured over nothing but padding, then replayed with batches of other sizes and lengths."""
    batches: list[list[int]] = [[700, 3], [9000], [1, 2048, 2049, 65, 4000, 512], [3], [6000, 6000, 40]]
    pages = 1200
    captured: Captured | None = None
    for seed, lengths in enumerate(batches):
        case = decoding(lengths, seed)
        parts = (case.k_pages, case.v_pages)
        grown = [torch.full((pages, *part.shape[1:]), float("nan"), dtype=part.dtype, device="cuda") for part in parts]
        for part, whole in zip(parts, grown, strict=True):
            whole[: part.shape[0]] = part
        case = replace(case, k_pages=grown[0], v_pages=grown[1])
        captured = captured or Captured(case, rows=8, width=600)
        for got, window in zip(captured.replay(case), (0, 500), strict=True):
            assert_same_bits(got, run(replace(case, window=window))[0])


@pytest.mark.parametrize(
    ("shape", "route"),
    [
        ({}, Backend.GLUON),
        ({"layout": KvLayout.HND, "page_tokens": 256, "dim": 64}, Backend.GLUON),
        ({"q_heads": 32}, Backend.GLUON),
        ({"layout": KvLayout.SHUFFLE}, Backend.TRITON),
        ({"page_tokens": 1}, Backend.TRITON),
        ({"dim": 96}, Backend.TRITON),
    ],
)
def test_route(shape: dict[str, object], route: Backend) -> None:
    case = decoding([5, 40], **shape)
    assert decode_route(case.q, case.k_pages, case.v_pages, layout=case.layout) is route
    if route is Backend.TRITON:
        with pytest.raises(KernelArgumentError, match="backend GLUON: needs"):
            run(case)


def test_fp8_with_a_scale_for_each_token_takes_the_plain_kernel() -> None:
    case = decoding([40], dtype=E4M3)
    q = torch.zeros(case.q.shape, dtype=torch.bfloat16, device="cuda")
    scales = torch.ones(case.k_pages.shape[0], 2, 16, device="cuda")
    one = torch.ones(1, device="cuda")
    pages = (case.k_pages, case.v_pages)
    assert decode_route(q, *pages, k_scales=scales, v_scales=scales) is Backend.TRITON
    assert decode_route(q, *pages, k_scales=one, v_scales=one) is Backend.GLUON
