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
    Fp8Experts,
    Fp8Words,
    Mxfp4Experts,
    Mxfp4Words,
    StoredExperts,
    dequantised,
    grouped_linear,
    hopper,
    packed_experts,
    plan_experts,
)
from kernels.grouped_linear.words import MAX_EXPONENT
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
from tests.kernels.test_grouped_linear_words import CODES, fp8_of_bf16, made


def fp8_of_a_small_factor(experts: int, outputs: int, depth: int) -> Fp8Experts:
    """It stays in the order of the files."""
    weight = fp8_experts(experts, outputs, depth)
    weight.scales[0, 0, 0] = 2.0**-90
    return weight


KEPT_AS = {fp8_of_a_small_factor: Fp8Experts, fp8_experts: Fp8Words, fp8_of_bf16: Fp8Words, mxfp4_experts: Mxfp4Words}
MAKERS = list(KEPT_AS)
# Outputs that are no whole tile with a depth that is no whole step, then depths of published models: DeepSeek V3's two,
# gpt-oss, whose rows have 90 exponents, and Qwen3-Next's.
SIZES = [(200, 576), (256, 7168), (384, 2048), (320, 2880), (130, 512)]
# Of fp8: whole groups of 16 columns, less than a step or a few more than several.
RAGGED = [(130, 16), (8, 48), (200, 144), (257, 656)]


@pytest.fixture
def on_hopper() -> None:
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")


def assert_bits(weight: StoredExperts, dtype: torch.dtype, rows: int, kept_as: type) -> None:
    """Of 150 tokens with two experts each, and a bias, against the plain kernel."""
    experts, outputs, depth = weight.shape
    x = torch.randn(150, depth, generator=seeded(3)).to(dtype).cuda()
    bias = torch.randn(experts, outputs, generator=seeded(4)).to(dtype).cuda()
    plan = plan_experts(chosen(150, 2, experts).cuda(), experts, tile_rows=rows)
    weight = moved(weight, "cuda")
    kept = packed_experts(weight, dtype=dtype)
    assert type(kept) is kept_as
    got = grouped_linear(x, kept, plan, bias, backend=Backend.GLUON)
    assert_same_bits(got, grouped_linear(x, dequantised(weight, dtype), plan, bias))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("make", MAKERS)
class TestOnHopper:
    @pytest.mark.parametrize("rows", TILE_ROWS)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_the_bits_of_its_values(self, make: Any, sizes: tuple[int, int], rows: int) -> None:
        assert_bits(make(4, *sizes), torch.bfloat16, rows, KEPT_AS[make])

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
        parts = type(weight)(within(weight.values, "cuda"), within(weight.scales, "cuda"))
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
    """Of fp8 they take the order of the files."""
    for rows in TILE_ROWS:
        assert_bits(make(4, 200, 576), torch.float16, rows, Mxfp4Words if make is mxfp4_experts else Fp8Experts)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_words_of_fp8_in_rows_that_are_no_whole_block(sizes: tuple[int, int], rows: int) -> None:
    for make in (fp8_experts, fp8_of_bf16):
        assert_bits(make(4, *sizes), torch.bfloat16, rows, Fp8Words)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_every_code_of_fp8_times_many_factors() -> None:
    """All 254, subnormal ones too, times every power of two that words take and as many numbers between them, of both
    signs, and times 0."""
    exponents = torch.arange(127 - 80, 127 + 7, dtype=torch.int32) << 7
    between = exponents | torch.randint(1, 128, exponents.shape, generator=seeded(1)).int()
    bits = torch.cat([exponents, between, torch.tensor([0])])
    bits = torch.cat([bits, bits | 1 << 15])
    assert_every_code((bits << 16).int().view(torch.float32), torch.int32)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_every_code_of_fp8_times_factors_of_24_bits() -> None:
    """Some of them with a rest that is not the nearest number."""
    exponents = torch.randint(-79, 7, (500,), generator=seeded(1)).int()
    factors = torch.ldexp(torch.rand(500, generator=seeded(2)) / 2 + 0.5, exponents)
    assert_every_code(torch.cat([factors, -factors]), torch.int64)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_factors_of_fp8_that_no_word_takes() -> None:
    """Subnormal ones or such that weights are, and large ones; no sum is infinite."""
    bits = torch.tensor([1, 5, 127, 9 << 7, 20 << 7 | 3, 46 << 7 | 127, 134 << 7, 240 << 7])
    assert_every_code((bits << 16).int().view(torch.float32), None)


def assert_every_code(factors: torch.Tensor, words: torch.dtype | None) -> None:
    """One factor for each expert, `words` their dtype there. One column of a row is not 0, so no sum is rounded."""
    values = torch.zeros(len(factors), 256, 64, dtype=torch.uint8)
    values[:, : len(CODES), 43] = CODES
    scales = factors[:, None, None].expand(-1, 2, 1).contiguous()
    weight = moved(Fp8Experts(values.view(torch.float8_e4m3fn), scales), "cuda")
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
    x[0, 43] = 1.0
    ids = torch.arange(len(factors), dtype=torch.int32, device="cuda")[None]
    plan = plan_experts(ids, len(factors))
    kept = packed_experts(weight)
    assert isinstance(kept, Fp8Words) and kept.factors.dtype == words if words else kept is weight
    got = grouped_linear(x, kept, plan, backend=Backend.GLUON)
    assert_same_bits(got + 0.0, dequantised(weight, torch.bfloat16)[:, :, 43] + 0.0)


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
WORDS, FP8_WORDS = made(MXFP4), made(FP8)
# Between experts there are 16 bytes, less than a row.
UNEVEN = torch.zeros(4 * (130 * 96 + 16), dtype=torch.float8_e4m3fn).as_strided((4, 130, 96), (130 * 96 + 16, 96, 1))
REFUSED: list[tuple[torch.Tensor, object, str]] = [
    (X, torch.zeros(4, 130, 96), "needs a weight of fp8, or of mxfp4 as packed_experts returns it"),
    (X, MXFP4, "needs a weight of fp8, or of mxfp4 as packed_experts returns it"),
    (X.float(), FP8, "needs 16-bit rows"),
    (X.half(), FP8_WORDS, "needs bf16 rows, got torch.float16"),
    (X.float(), FP8_WORDS, "needs bf16 rows, got torch.float32"),
    (torch.zeros(6, 104, dtype=torch.bfloat16)[:, :96], FP8, "needs rows of x"),
    (torch.zeros(6, 104, dtype=torch.bfloat16)[:, :96], FP8_WORDS, "needs rows of x"),
    (X, fp8_experts(4, 130, 200), "needs rows of values that are multiples of 16 bytes apart"),
    (X, FP8._replace(values=UNEVEN), "equally far apart"),
]


@pytest.mark.skipif(INTERPRETING, reason="no kernel runs here")
def test_which_weights_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = (FP8, WORDS, FP8_WORDS)
    assert all(hopper.reason_against(X, weight) == "needs a Hopper GPU" for weight in taken)
    assert packed_experts(MXFP4) is MXFP4 and packed_experts(FP8) is FP8
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert all(hopper.reason_against(X, weight) is None for weight in taken)
    assert all(hopper.reason_against(X.half(), weight) is None for weight in (FP8, WORDS))
    for x, weight, reason in REFUSED:
        assert reason in str(hopper.reason_against(x, weight))
    packed = packed_experts(MXFP4)
    assert isinstance(packed, Mxfp4Words) and torch.equal(packed.values, WORDS.values)
    assert packed_experts(MXFP4, Backend.TRITON) is MXFP4
    large = MXFP4.scales.clone()
    large[2, 7, 1] = MAX_EXPONENT + 1
    assert isinstance(packed_experts(MXFP4._replace(scales=large)), Mxfp4Experts)


def with_byte(byte: int) -> Fp8Experts:
    values = FP8.values.view(torch.uint8).clone()
    values[3, 129, 95] = byte
    return FP8._replace(values=values.view(torch.float8_e4m3fn))


def with_factor(factor: float) -> Fp8Experts:
    scales = FP8.scales.clone()
    scales[2, 1, 0] = factor
    return FP8._replace(scales=scales)


IN_WORDS = [FP8, with_byte(0x7E), with_byte(0xFE), with_byte(0x80), with_factor(0.0), with_factor(-1.0)]
# NaN of either sign, factors that are too small or large, rows of half a group.
AS_IN_FILES = [
    with_byte(0x7F),
    with_byte(0xFF),
    with_factor(2.0**-81),
    with_factor(128.0),
    with_factor(float("nan")),
    fp8_experts(4, 130, 104),
]


@pytest.mark.skipif(INTERPRETING, reason="no kernel runs here")
def test_which_fp8_is_put_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    for weight in IN_WORDS:
        packed = packed_experts(weight)
        assert isinstance(packed, Fp8Words)
        assert packed.values.equal(made(weight).values) and packed.factors.equal(made(weight).factors)
    assert all(packed_experts(weight) is weight for weight in AS_IN_FILES)
    assert packed_experts(FP8, dtype=torch.float16) is FP8
    assert isinstance(packed_experts(MXFP4, dtype=torch.float16), Mxfp4Words)
    for weight in (FP8, MXFP4):
        assert packed_experts(weight, dtype=torch.float32) is weight
    for backend in (Backend.TRITON, Backend.REFERENCE):
        assert packed_experts(FP8, backend) is FP8


@pytest.mark.skipif(INTERPRETING, reason="no kernel runs here")
def test_a_case_that_does_not_fit_is_named() -> None:
    plan = plan_experts(torch.tensor([[0, 2]] * 6, dtype=torch.int32), 4, backend=Backend.REFERENCE)
    with pytest.raises(KernelArgumentError, match="backend GLUON: needs a Hopper GPU"):
        grouped_linear(X, FP8, plan, backend=Backend.GLUON)
