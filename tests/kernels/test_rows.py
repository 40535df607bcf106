"""rms_norm: torch's own values and rounding points, row by row."""

import pytest
import torch
from torch.nn import functional

from kernels.backend import Backend
from kernels.errors import KernelArgumentError
from kernels.rms_norm import rms_norm
from tests.kernels.compare import assert_same_bits
from tests.kernels.conftest import INTERPRETING
from tests.kernels.target import Target

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Relative and absolute: one rounding to the dtype, of numbers that agree in fp32 but for the order of a sum.
STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}


def rows(*size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), wanted.double(), rtol=step, atol=step / 8)


def assert_rarely_different(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Half precision hides the order of a sum nearly always: another rounding point would show in every tenth value."""
    assert_close(got, wanted)
    if got.dtype is not torch.float32:
        assert got.ne(wanted).sum().item() <= 2 + got.numel() // 50


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 64, 80, 1000, 4096])
def test_norm(target: Target, dim: int, dtype: torch.dtype) -> None:
    x, weight = rows(5, dim, dtype=dtype, device=target.device), rows(dim, dtype=dtype, device=target.device, seed=1)
    got = rms_norm(x, weight, 1e-5, backend=target.backend)
    assert_rarely_different(got, functional.rms_norm(x, (dim,), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_a_sum(target: Target, dtype: torch.dtype) -> None:
    """The sum is rounded before it is normed, as two ops would."""
    x, residual = (rows(7, 4096, dtype=dtype, device=target.device, seed=seed) for seed in (0, 1))
    weight = rows(4096, dtype=dtype, device=target.device, seed=2)
    normed, total = rms_norm(x, weight, 1e-6, residual=residual, backend=target.backend)
    assert_same_bits(total, x + residual)
    assert_rarely_different(normed, functional.rms_norm(total, (4096,), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [80, 1152])
def test_weights_counted_from_one(target: Target, dim: int, dtype: torch.dtype) -> None:
    """Gemma's norm, with 1 + w in fp32: transformers' bits where the sum of squares runs in the same order."""
    weight = rows(dim, dtype=dtype, device=target.device, seed=1) / 2
    x = rows(40, dim, dtype=dtype, device=target.device)
    got = rms_norm(x, 1.0 + weight.float(), 1e-6, backend=target.backend)
    if INTERPRETING:
        # To import transformers takes longer than all else here, and the reference has its bits.
        assert_rarely_different(got, rms_norm(x, 1.0 + weight.float(), 1e-6, backend=Backend.REFERENCE))
        return
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    module = gemma.Gemma3RMSNorm(dim, eps=1e-6).to(target.device)
    module.weight.data = weight
    with torch.no_grad():
        wanted = module(x)
    if target.backend is Backend.REFERENCE:
        assert_same_bits(got, wanted)
    else:
        assert_rarely_different(got, wanted)


def test_rows_do_not_see_each_other(target: Target) -> None:
    """A row's bits depend neither on the rows beside it nor on how many there are."""
    x, weight = rows(33, 4096, device=target.device), rows(4096, device=target.device, seed=1)
    all_rows = rms_norm(x, weight, 1e-5, backend=target.backend)
    for row in (0, 17, 32):
        assert_same_bits(rms_norm(x[row : row + 1], weight, 1e-5, backend=target.backend), all_rows[row : row + 1])


def test_norm_of_slices_into_given_memory(target: Target) -> None:
    wide, weight = rows(4, 3 * 256, device=target.device), rows(256, device=target.device, seed=1)
    residual = rows(4, 512, device=target.device, seed=2)[:, 256:]
    out = torch.full((4, 256), float("nan"), dtype=torch.bfloat16, device=target.device)
    x = wide[:, 256:512]
    normed, total = rms_norm(x, weight, 1e-5, residual=residual, out=out, backend=target.backend)
    assert normed is out
    wanted, wanted_total = rms_norm(x.contiguous(), weight, 1e-5, residual=residual.contiguous())
    assert_rarely_different(normed, wanted)
    assert_same_bits(total, wanted_total)


def test_norm_into_fp32_is_not_rounded(target: Target) -> None:
    x, weight = rows(4, 256, device=target.device), torch.ones(256, device=target.device)
    out = torch.empty(4, 256, device=target.device)
    assert rms_norm(x, weight, 1e-5, out=out, backend=target.backend) is out
    torch.testing.assert_close(out, functional.rms_norm(x.float(), (256,), weight, 1e-5), rtol=1e-5, atol=1e-6)
    assert_same_bits(out.to(x.dtype), rms_norm(x, weight, 1e-5, backend=target.backend))


def test_no_rows(target: Target) -> None:
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=target.device)
    normed, total = rms_norm(empty, empty.new_ones(64), 1e-5, residual=empty, backend=target.backend)
    assert normed.shape == total.shape == (0, 64)


X, WEIGHT = rows(4, 64), rows(64, seed=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, r"x: shape must be \[any, any\], got \[64\]"),
        ({"x": X.T}, "x: the last axis must have stride 1"),
        ({"x": X.to(torch.float64)}, "x: dtype must be one of"),
        ({"weight": WEIGHT[:32]}, r"weight: shape must be \[64\], got \[32\]"),
        ({"weight": WEIGHT.half()}, "weight: dtype must be one of"),
        ({"residual": X[:3]}, r"residual: shape must be \[4, 64\], got \[3, 64\]"),
        ({"residual": X.to("meta")}, "residual: must be on cpu, is on meta"),
        ({"out": X.clone()[:3]}, r"out: shape must be \[4, 64\], got \[3, 64\]"),
        ({"out": X}, "out: shares memory with x"),
        ({"out": X.new_zeros(4, 128)[:, :64]}, "out: must be contiguous"),
    ],
)
def test_what_a_norm_refuses(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"x": X, "weight": WEIGHT, "eps": 1e-5}
    with pytest.raises(KernelArgumentError, match=message):
        rms_norm(**(given | change))  # type: ignore[call-overload]


def test_an_output_that_is_read() -> None:
    other = torch.zeros_like(X)
    with pytest.raises(KernelArgumentError, match="out: shares memory with residual"):
        rms_norm(X, WEIGHT, 1e-5, residual=other, out=other)
