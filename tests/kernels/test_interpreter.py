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
