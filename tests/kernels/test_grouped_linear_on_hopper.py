"""grouped_linear's Gluon kernel for stored weights on a Hopper GPU: the bits of the plain kernel; and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.backend import Backend, is_hopper
from kernels.errors import KernelArgumentError
from kernels.graph_capture import graph_capture
from kernels.grouped_linear import (
    TILE_ROWS,
    Mxfp4Experts,
    Mxfp4Words,
    StoredExperts,
    dequantised,
    grouped_linear,
    hopper,
    packed_experts,
    plan_experts,
)
from kernels.grouped_linear.words import MAX_EXPONENT, words_of
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import HOPPER
from tests.kernels.test_grouped_linear_stored import (
    chosen,
    fp8_experts,
    moved,
    mxfp4_experts,
    products,
    seeded,
    within,
)

MAKERS = [fp8_experts, mxfp4_experts]
# Outputs that are no whole tile with a depth that is no whole step, then depths of published models: DeepSeek V3's two,
# gpt-oss, whose rows have 90 exponents, and Qwen3-Next's.
SIZES = [(200, 576), (256, 7168), (384, 2048), (320, 2880), (130, 512)]


@pytest.fixture
def on_hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def assert_bits(weight: StoredExperts, dtype: torch.dtype, rows: int) -> None:
    """Of 150 tokens with two experts each, and a bias, against the plain kernel."""
    experts, outputs, depth = weight.shape
    x = torch.randn(150, depth, generator=seeded(3)).to(dtype).cuda()
    bias = torch.randn(experts, outputs, generator=seeded(4)).to(dtype).cuda()
    plan = plan_experts(chosen(150, 2, experts).cuda(), experts, tile_rows=rows)
    weight = moved(weight, "cuda")
    got = grouped_linear(x, packed_experts(weight), plan, bias, backend=Backend.GLUON)
    assert_same_bits(got, grouped_linear(x, dequantised(weight, dtype), plan, bias))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("make", MAKERS)
class TestOnHopper:
    @pytest.mark.parametrize("rows", TILE_ROWS)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_the_bits_of_its_values(self, make: Any, sizes: tuple[int, int], rows: int) -> None:
        assert_bits(make(4, *sizes), torch.bfloat16, rows)

    def test_a_row_has_its_own_bits(self, make: Any) -> None:
        """In tiles of every size, alone and among others."""
        weight, ids = packed_experts(moved(make(6, 200, 704), "cuda")), chosen(150, 3, 6).cuda()
        x = torch.randn(150, 704, generator=seeded(3)).bfloat16().cuda()

        def product(some: slice, rows: int | None = None) -> torch.Tensor:
            plan = plan_experts(ids[some].contiguous(), 6, tile_rows=rows)
            return grouped_linear(x[some], weight, plan, backend=Backend.GLUON).view(-1, 3, 200)

        together = product(slice(None), 16)
        for rows in TILE_ROWS[1:]:
            assert_same_bits(product(slice(None), rows), together)
        for some in (slice(0, 1), slice(40, 41), slice(7, 27), slice(149, 150)):
            assert_same_bits(product(some), together[some])

    def test_a_row_for_each_pair(self, make: Any) -> None:
        weight, ids = moved(make(4, 192, 320), "cuda"), chosen(50, 2, 4).cuda()
        x = torch.randn(100, 320, generator=seeded(3)).bfloat16().cuda()
        plan = plan_experts(ids, 4)
        got = grouped_linear(x, packed_experts(weight), plan, backend=Backend.GLUON)
        assert_same_bits(got, grouped_linear(x, dequantised(weight, torch.bfloat16), plan))

    def test_slices_and_pairs_without_an_expert(self, make: Any) -> None:
        weight = make(3, 256, 320)
        ids, x = chosen(40, 2, 3), torch.randn(40, 320, generator=seeded(3)).bfloat16()
        ids[::3, 1] = 3
        wide = torch.full((40, 352), float("nan"), dtype=torch.bfloat16, device="cuda")
        wide[:, 16:336] = x.cuda()
        parts = type(weight)(within(weight.values, "cuda"), moved(weight, "cuda").scales)
        plan = plan_experts(ids.cuda(), 3)
        got = grouped_linear(wide[:, 16:336], packed_experts(parts), plan, backend=Backend.GLUON)
        is_pair = (ids < 3).flatten()
        assert_same_bits(got[is_pair], products(weight, x, ids, HOPPER)[is_pair])

    def test_a_captured_graph_takes_any_choice(self, make: Any) -> None:
        weight = packed_experts(moved(make(8, 256, 512), "cuda"))
        ids, x = chosen(64, 2, 8).cuda(), torch.randn(64, 512, generator=seeded(3)).bfloat16().cuda()

        def product() -> torch.Tensor:
            return grouped_linear(x, weight, plan_experts(ids, 8), backend=Backend.GLUON)

        product()
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph):
            out = product()
        for expert in (0, 7):
            ids[:, 0], ids[:, 1] = expert, 3
            x.neg_()
            graph.replay()
            assert_same_bits(out, product())


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("make", MAKERS)
def test_rows_of_float16(make: Any) -> None:
    for rows in TILE_ROWS:
        assert_bits(make(4, 200, 576), torch.float16, rows)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_every_exponent_of_mxfp4() -> None:
    """Subnormal weights too, but none whose sums are infinite: one column is not 0."""
    assert_every_exponent(torch.arange(MAX_EXPONENT + 1, dtype=torch.uint8), Mxfp4Words)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_exponents_of_mxfp4_that_no_word_takes() -> None:
    assert_every_exponent(torch.arange(MAX_EXPONENT + 1, 252, dtype=torch.uint8), Mxfp4Experts)


def assert_every_exponent(exponents: torch.Tensor, kept_as: type) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(len(exponents))
    values = torch.zeros(1, len(codes), 32, dtype=torch.uint8)
    values[0, :, 21] = codes << 4
    scales = torch.zeros(1, len(codes), 2, dtype=torch.uint8)
    scales[0, :, 1] = exponents.repeat(16)
    weight = moved(Mxfp4Experts(values, scales), "cuda")
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
    x[0, 43] = 1.0
    plan = plan_experts(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), 1)
    kept = packed_experts(weight)
    assert isinstance(kept, kept_as)
    got = grouped_linear(x, kept, plan)
    assert_same_bits(got[0] + 0.0, dequantised(weight, torch.bfloat16)[0, :, 43] + 0.0)


X, FP8, MXFP4 = torch.zeros(6, 96, dtype=torch.bfloat16), fp8_experts(4, 130, 96), mxfp4_experts(4, 130, 96)
WORDS = words_of(MXFP4)
# Between experts there are 16 bytes, less than a row.
UNEVEN = torch.zeros(4 * (130 * 96 + 16), dtype=torch.float8_e4m3fn).as_strided((4, 130, 96), (130 * 96 + 16, 96, 1))
REFUSED: list[tuple[torch.Tensor, object, str]] = [
    (X, torch.zeros(4, 130, 96), "needs a weight of fp8, or of mxfp4 as packed_experts returns it"),
    (X, MXFP4, "needs a weight of fp8, or of mxfp4 as packed_experts returns it"),
    (X.float(), FP8, "needs 16-bit rows"),
    (torch.zeros(6, 104, dtype=torch.bfloat16)[:, :96], FP8, "needs rows of x"),
    (X, fp8_experts(4, 130, 200), "needs rows of values that are multiples of 16 bytes apart"),
    (X, FP8._replace(values=UNEVEN), "equally far apart"),
]


@pytest.mark.skipif(INTERPRETING, reason="no kernel runs here")
def test_which_weights_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = (FP8, WORDS)
    assert all(hopper.reason_against(X, weight) == "needs a Hopper GPU" for weight in taken)
    assert packed_experts(MXFP4) is MXFP4
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert all(hopper.reason_against(x, weight) is None for x in (X, X.half()) for weight in taken)
    for x, weight, reason in REFUSED:
        assert reason in str(hopper.reason_against(x, weight))
    packed = packed_experts(MXFP4)
    assert isinstance(packed, Mxfp4Words) and torch.equal(packed.values, WORDS.values)
    assert packed_experts(MXFP4, Backend.TRITON) is MXFP4
    large = MXFP4.scales.clone()
    large[2, 7, 1] = MAX_EXPONENT + 1
    assert isinstance(packed_experts(MXFP4._replace(scales=large)), Mxfp4Experts)


@pytest.mark.skipif(INTERPRETING, reason="no kernel runs here")
def test_a_case_that_does_not_fit_is_named() -> None:
    plan = plan_experts(torch.tensor([[0, 2]] * 6, dtype=torch.int32), 4, backend=Backend.REFERENCE)
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        grouped_linear(X, FP8, plan, backend=Backend.GLUON)
