"""solve_few_channels on a Hopper GPU has the bits of solve_channels, with one and two programs for a block; and which
launches take it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.backend import is_hopper
from kernels.block_scan import GatedDeltaLayer, ScanPlan, max_blocks, plan_scan
from kernels.block_scan.call import BlockScan
from kernels.gated_delta_scan import gated_delta_scan
from kernels.graph_capture import graph_capture
from tests.kernels import test_gated_delta_scan as delta
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.state_inputs import Begin, StateRow, begins, keys, make_pool, make_slots, placed

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter has no Gluon")

EPS = 1e-6
LENGTHS = (1, 15, 16, 17, 33, 63, 64)
SIZES = [delta.Heads(4, 4, 128, 128, True), delta.Heads(2, 4, 128, 64, True)]
# Rows of each length, among empty ones and padding, some of which have tokens of nobody.
MIXED = [
    StateRow(1), StateRow(0, Begin.WORKING), *(StateRow(length) for length in LENGTHS), StateRow(0, Begin.PADDING),
    StateRow(3, Begin.PADDING), StateRow(16, Begin.WORKING), StateRow(0, Begin.PADDING),
]  # fmt: skip
# Tokens of eight rows, for which one graph of 16 tokens is captured. Positions are 0 but for the second row's.
REPLAYED = ((16, 0, 0, 0, 0, 0, 0, 0), (1, 15, 0, 0, 0, 0, 0, 0), (2, 2, 2, 2, 2, 2, 2, 2), (3, 12, 0, 0, 0, 0, 0, 0))


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(params=[True, False], ids=["two programs", "one program"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All launches take the kernel for few blocks, with two programs for each or, as if they did not fit, one."""
    from kernels.gated_delta_scan.hopper import launch

    monkeypatch.setattr(launch, "is_few", lambda *_: launch.FEW_PROGRAMS > 0)
    monkeypatch.setattr(launch, "FEW_AT_ONCE", launch.FEW_AT_ONCE if request.param else 0)
    yield


def solved(layer: GatedDeltaLayer, plan: ScanPlan, *, is_few: bool) -> BlockScan:
    from kernels.gated_delta_scan.hopper import launch

    with pytest.MonkeyPatch.context() as patch:
        if not is_few:
            patch.setattr(launch, "FEW_PROGRAMS", 0)
        return launch.solve(layer, plan)


def covered(plan: ScanPlan) -> torch.Tensor:
    """Returns the tokens that lie in blocks."""
    count = int(plan.cu_blocks[-1])
    spans = plan.blocks[:count].tolist()
    return torch.cat([torch.arange(first, first + tokens, device="cuda") for first, tokens in spans])


def check_solved(rows: list[StateRow], first: list[int], sizes: delta.Heads, dtype: torch.dtype) -> None:
    """All that the blocks become has the same bits; tokens behind the last row are NaN."""
    slots, count = make_slots(rows)
    lengths = begins(rows)
    end = int(lengths[-1])
    given = delta.Layer(*(tensor.cuda() for tensor in delta.layer(end + 64, sizes, dtype)))
    for tensor in given:
        tensor[end:] = float("nan")
    states = make_pool(slots, rows, count, sizes.state, torch.float32).cuda()
    plan = plan_scan(lengths.cuda(), keys(first, rows).cuda(), placed(slots, "cuda"), end + 64)
    layer = GatedDeltaLayer(*given, states, 1.0, EPS)
    got, wanted = (solved(layer, plan, is_few=is_few) for is_few in (True, False))
    at, blocks = covered(plan), int(plan.cu_blocks[-1])
    for name in ("q", "k", "kept", "inverses", "scores"):
        assert_same_bits(getattr(got, name)[at], getattr(wanted, name)[at])
    assert got.remains is not None and wanted.remains is not None
    assert_same_bits(got.remains[:blocks], wanted.remains[:blocks])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "few")
class TestFew:
    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_blocks_of_each_length(self, sizes: delta.Heads, length: int) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            check_solved([StateRow(length)], [0], sizes, dtype)

    def test_many_short_blocks_again_and_again(self) -> None:
        """As many programs as a card holds: of eight blocks, 5 launches in 6 had a pair with another number once."""
        for _ in range(10):
            check_solved([StateRow(16)] * 8, [0] * 8, delta.Heads(32, 32, 128, 128, True), torch.bfloat16)

    def test_a_block_that_begins_off_the_grid(self) -> None:
        check_solved([StateRow(16)], [56], SIZES[0], torch.bfloat16)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_rows_of_every_kind(self, sizes: delta.Heads) -> None:
        check_solved(MIXED, [7 * index for index in range(len(MIXED))], sizes, torch.bfloat16)

    def test_the_whole_op(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kernels.gated_delta_scan.hopper import launch
        from tests.kernels.target import HOPPER

        sizes = SIZES[0]
        slots, count = make_slots(MIXED)
        pool = make_pool(slots, MIXED, count, sizes.state, torch.float32)
        given, first = delta.layer(int(begins(MIXED)[-1]), sizes, torch.bfloat16), [0] * len(MIXED)
        got = delta.scanned(given, first, MIXED, pool, slots, HOPPER)
        monkeypatch.setattr(launch, "FEW_PROGRAMS", 0)
        for one, other in zip(got, delta.scanned(given, first, MIXED, pool, slots, HOPPER), strict=True):
            assert_same_bits(one, other)

    def test_a_graph_that_is_replayed_with_other_lengths(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kernels.gated_delta_scan.hopper import launch

        sizes, rows = SIZES[0], [StateRow(length, Begin.WORKING) for length in REPLAYED[0]]
        slots, count = make_slots(rows)
        pool = make_pool(slots, rows, count, sizes.state, torch.float32).cuda()
        given = delta.Layer(*(tensor.cuda() for tensor in delta.layer(16, sizes, torch.bfloat16)))
        lengths, ends, on_device = begins(rows).cuda(), begins(rows).cuda(), placed(slots, "cuda")
        states = pool.clone()

        def work() -> torch.Tensor:
            plan = plan_scan(lengths, ends, on_device, 16)
            return gated_delta_scan(*given, states, plan, norm_eps=EPS)

        work()
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            out = work()
        monkeypatch.setattr(launch, "FEW_PROGRAMS", 0)
        for tokens in REPLAYED:
            replayed = [StateRow(length) for length in tokens]
            lengths.copy_(begins(replayed))
            ends.copy_(keys([0, 60, *([0] * 6)], replayed))
            states.copy_(pool)
            graph.replay()
            got = out.clone(), states.clone()
            states.copy_(pool)
            assert_same_bits(got[0], work())
            assert_same_bits(got[1], states)


@pytest.mark.parametrize(
    ("tokens", "rows", "heads", "expected"),
    [
        *((16, rows, 32, True) for rows in (1, 8, 64)),
        *((32, 64, 32, True), (64, 1, 32, True), (128, 8, 32, True), (256, 1, 32, True)),
        # Too many programs for blocks that may not exist, or more tokens than few blocks can hold.
        *((64, 64, 32, False), (320, 1, 32, False), (2048, 1, 32, False), (2048, 1, 1, True)),
    ],
)
def test_launches_of_few_blocks(tokens: int, rows: int, heads: int, expected: bool) -> None:
    """Of Kimi Linear's heads, on a card of 132 multiprocessors."""
    from kernels.gated_delta_scan.hopper.launch import is_few

    assert is_few(tokens, heads, max_blocks(tokens, rows), 132) is expected
