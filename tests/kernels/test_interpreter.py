"""What tests/kernels/interpreter.py makes of Triton's interpreter, where no op's test would show it."""

import pytest
import torch

from tests.kernels.conftest import INTERPRETING

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="needs the interpreter")


@triton.jit
def square(numbers_ptr, out_ptr, N: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    number = tl.load(numbers_ptr + at)
    tl.store(out_ptr + at, number * number)


def squared(number: int, dtype: torch.dtype) -> int:
    out = torch.zeros(4, dtype=dtype)
    square[(1,)](torch.tensor([1, 2, 3, number], dtype=dtype), out, N=4)
    return int(out[3])


def test_an_overflow_of_int32_is_told() -> None:
    assert squared(46_340, torch.int32) == 46_340**2
    with pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow in mul"):
        squared(46_341, torch.int32)


def test_int64_does_not_overflow_there() -> None:
    assert squared(46_341, torch.int64) == 46_341**2


@triton.jit
def decayed(factor, total, next_factor, number):
    """Neither commutes nor rounds alike in another order."""
    return factor * next_factor, total * next_factor + number


@triton.jit
def reduce_and_scan(numbers_ptr, out_ptr, total_ptr, N: tl.constexpr, M: tl.constexpr, AXIS: tl.constexpr):  # noqa: N803
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, M)[None, :]
    numbers = tl.load(numbers_ptr + rows * M + columns)
    halves = tl.full((N, M), 0.7, tl.float32)
    _, scanned = tl.associative_scan((halves, numbers), AXIS, decayed)
    tl.store(out_ptr + rows * M + columns, scanned)
    _, total = tl.reduce((halves, numbers), AXIS, decayed, keep_dims=True)
    tl.store(total_ptr + rows * M + columns, tl.broadcast_to(total, N, M))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_kernels_own_function_goes_along_the_axis_in_order(axis: int) -> None:
    numbers = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    out, total = torch.empty(8, 4), torch.empty(8, 4)
    reduce_and_scan[(1,)](numbers, out, total, N=8, M=4, AXIS=axis)
    wanted = numbers.clone().movedim(axis, 0)
    for at in range(1, wanted.shape[0]):
        wanted[at] += wanted[at - 1] * 0.7
    assert torch.equal(out.movedim(axis, 0), wanted)
    assert torch.equal(total.movedim(axis, 0), wanted[-1:].expand_as(wanted))


@triton.jit
def sort_numbers(numbers_ptr, up_ptr, down_ptr, N: tl.constexpr, M: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    numbers = tl.load(numbers_ptr + at)
    tl.store(up_ptr + at, tl.sort(numbers))
    tl.store(down_ptr + at, tl.sort(numbers, descending=True))


def test_rows_are_sorted() -> None:
    numbers = torch.randint(-50, 50, (4, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    up, down = torch.empty_like(numbers), torch.empty_like(numbers)
    sort_numbers[(1,)](numbers, up, down, N=4, M=32)
    assert torch.equal(up, numbers.sort(-1).values) and torch.equal(down, up.flip(-1))
